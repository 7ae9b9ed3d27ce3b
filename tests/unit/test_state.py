"""TrainerState: what the trainer published is what a role sees, and a dead listener is never silent."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelinerl.errors import DeadlineError, StreamError
from pipelinerl.records import (
    ProbeMissed,
    ProbePassed,
    SamplesProcessed,
    TrainerMessage,
    TrainingDone,
    WeightUpdateSuccess,
)
from pipelinerl.state import TrainerState
from pipelinerl.streams import SingleStreamSpec, TopicWriter, open_writer, set_streams_backend
from tests.memory_streams import MemoryBackend
from tests.says import says


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[TopicWriter[TrainerMessage]]:
    set_streams_backend(MemoryBackend())
    with open_writer(SingleStreamSpec(tmp_path, "trainer"), TrainerMessage) as writer:
        yield writer


@pytest.fixture
def state(tmp_path: Path, trainer: TopicWriter[TrainerMessage]) -> Iterator[TrainerState]:
    state = TrainerState(tmp_path)
    yield state
    state.stop()


def test_state_before_any_message_knows_nothing(state: TrainerState):
    state.start_listening()
    assert state.weights == (None, {})
    assert state.samples_processed is None
    assert not state.training_done
    with pytest.raises(DeadlineError, match=says("first weight update", "finetune_0", "0.01 s")):
        state.wait_for_model_version(timeout_s=0.01)
    with pytest.raises(DeadlineError, match="first optimizer step"):
        state.wait_for_processed_samples(timeout_s=0.01)
    assert state.wait_for_training_done(0.01) is False


def test_state_follows_the_newest_messages(state: TrainerState, trainer: TopicWriter[TrainerMessage]):
    trainer.write(WeightUpdateSuccess(version=0, servers=("actor_llm_0", "actor_llm_1")))
    state.start_listening()
    assert state.wait_for_model_version(10) == 0
    assert state.servers == ("actor_llm_0", "actor_llm_1")
    trainer.write(WeightUpdateSuccess(version=1, servers=("actor_llm_1",)))
    trainer.write(SamplesProcessed(samples_processed=32, step=1))
    assert state.wait_for_processed_samples(10) == 32
    assert (state.propagated_weight_version, state.servers) == (1, ("actor_llm_1",))
    trainer.write(TrainingDone(step=1))
    assert state.wait_for_training_done(10) is True
    assert state.training_done


def test_server_that_missed_its_probe_is_out_until_it_is_named_again(
    state: TrainerState, trainer: TopicWriter[TrainerMessage]
):
    trainer.write(WeightUpdateSuccess(version=3, servers=("actor_llm_0", "actor_llm_1")))
    trainer.write(ProbeMissed(server="actor_llm_0", version=3, since=2, is_final=False, reason="0.9 nats"))
    trainer.write(SamplesProcessed(samples_processed=32, step=1))
    state.start_listening()
    assert state.wait_for_processed_samples(10) == 32
    assert state.weights == (3, {"actor_llm_1": 3})
    trainer.write(WeightUpdateSuccess(version=3, servers=("actor_llm_0", "actor_llm_1")))
    trainer.write(TrainingDone(step=1))
    assert state.wait_for_training_done(10) is True
    assert state.weights == (3, {"actor_llm_0": 3, "actor_llm_1": 3})


def test_verified_version_grows_with_probes_and_goes_with_the_server(
    state: TrainerState, trainer: TopicWriter[TrainerMessage]
):
    both = ("actor_llm_0", "actor_llm_1")
    trainer.write(WeightUpdateSuccess(version=3, servers=both, proved=dict.fromkeys(both, 2)))
    trainer.write(ProbePassed(proved={"actor_llm_0": 3, "actor_llm_7": 3}))
    trainer.write(SamplesProcessed(samples_processed=32, step=1))
    state.start_listening()
    assert state.wait_for_processed_samples(10) == 32
    assert state.verified == {"actor_llm_0": 3, "actor_llm_1": 2}
    trainer.write(ProbeMissed(server="actor_llm_1", version=3, since=3, is_final=False, reason="0.9 nats"))
    trainer.write(WeightUpdateSuccess(version=4, servers=both[:1], proved={"actor_llm_0": 3}))
    trainer.write(TrainingDone(step=1))
    assert state.wait_for_training_done(10) is True
    assert state.verified == {"actor_llm_0": 3}


def test_waiting_without_a_listener_is_a_programming_error(state: TrainerState):
    with pytest.raises(AssertionError, match="start_listening"):
        state.wait_for_model_version(0)


def test_listener_that_reads_a_foreign_record_hands_the_cause_to_the_caller(tmp_path: Path):
    set_streams_backend(MemoryBackend())
    with open_writer(SingleStreamSpec(tmp_path, "trainer"), dict) as writer:
        writer.write({"version": 3})
    state = TrainerState(tmp_path)
    state.start_listening()
    with pytest.raises(StreamError, match=says("trainer/0/0", "record 0")):
        state.wait_for_model_version(10)
    with pytest.raises(StreamError, match="died"):
        _ = state.propagated_weight_version
    with pytest.raises(StreamError, match="died"):
        state.wait_for_training_done(10)
    state.stop()


def test_training_done_of_a_run_that_was_extended_does_not_count(tmp_path: Path, trainer: TopicWriter[TrainerMessage]):
    trainer.write(TrainingDone(step=96))
    state = TrainerState(tmp_path, last_step=200)
    state.start_listening()
    trainer.write(SamplesProcessed(samples_processed=1, step=97))
    assert state.wait_for_processed_samples(10) == 1
    assert not state.training_done
    trainer.write(TrainingDone(step=200))
    assert state.wait_for_training_done(10)
    state.stop()


def test_servers_with_an_older_version_are_in_service_with_it(
    state: TrainerState, trainer: TopicWriter[TrainerMessage]
):
    trainer.write(WeightUpdateSuccess(version=3, servers=("actor_llm_1",), older={"actor_llm_0": 2}))
    state.start_listening()
    assert state.wait_for_model_version(10) == 3
    assert state.weights == (3, {"actor_llm_0": 2, "actor_llm_1": 3})
