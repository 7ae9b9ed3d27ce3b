"""Clients as published against the recording endpoint: what each said and was answered is replayed, word for word.

The recordings are made by `python -m tests.clients.exchanges`, in the environment of `make clients`.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from pipelinerl.inspect.ledger import read_ledger
from pipelinerl.observability.metrics import read_metrics
from pipelinerl.records import ActorRecord, RolloutGroup
from pipelinerl.streams import SingleStreamSpec, open_reader, set_streams_backend
from tests.clients.exchanges import RECORDED, play, replay
from tests.clients.programs import PROGRAMS, PYTHON
from tests.clients.training import POSITIONS, forks_of, ways
from tests.launches import run_experiment


@pytest.mark.parametrize("name", PROGRAMS)
async def test_recorded_exchange_is_answered_and_trained_as_it_was(name: str) -> None:
    recording = json.loads((RECORDED / f"{name}.json").read_text())
    assert await replay(PROGRAMS[name], recording["exchanges"]) == recording


needs_clients = pytest.mark.skipif(not PYTHON.exists(), reason="needs the environment of `make clients`")
STEPS, ATTEMPTS = 5, 2
OWN_PROMPTS = ("smolagents", "mini-swe-agent")
"""Clients with prompts of thousands of tokens, which the tiny model does not know: it calls one tool at a time."""
RUN_TIMEOUT_S = 1500


@needs_clients
@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
async def test_client_says_what_was_recorded(name: str, tmp_path: Path) -> None:
    recording = json.loads((RECORDED / f"{name}.json").read_text())
    assert await play(PROGRAMS[name], tmp_path) == recording


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first training that calls a tool builds the model, and the others find it."""
    return tmp_path_factory.mktemp("models")


def train(package: str, run_dir: Path, models: Path, *overrides: str) -> list[RolloutGroup]:
    """Runs a training in which an epoch has each way of the client once, and returns what was rolled out."""
    tool = next(iter(ways(package).values())).tool
    with forks_of(package) as forks:
        run_experiment(
            "quickstart_agent",
            run_dir,
            f"model_path={models / tool}",
            "dataset_loader=tests.clients.training.load_problems",
            f"+dataset_loader_params.package={package}",
            f"+dataset_loader_params.forks={forks}",
            "test_dataset_names=[]",
            "actor.rollout_policy=tests.clients.training.generate_rollout",
            "tiny_model.recipe=tests.clients.training.recipe",
            f"+tiny_model.params.tool={tool}",
            f"vllm_config.vllm_kwargs.max_model_len={POSITIONS}",
            f"finetune.seq_length={POSITIONS}",
            f"finetune.gradient_accumulation_passes={ATTEMPTS * len(ways(package))}",
            f"attempts={ATTEMPTS}",
            "actor.rollout_timeout_s=600",
            "launcher.hang_timeout_s=600",
            "launcher.startup_timeout_s=900",  # a busy machine took more than 300 s to import vLLM
            *overrides,
            timeout_s=RUN_TIMEOUT_S,
        )
    set_streams_backend("files")
    with open_reader(SingleStreamSpec(run_dir, "actor"), ActorRecord, name=None) as reader:
        return [group for _, group in reader.read_all() if isinstance(group, RolloutGroup)]


@needs_clients
@pytest.mark.slow
@pytest.mark.timeout(RUN_TIMEOUT_S + 60)
@pytest.mark.parametrize("package", dict.fromkeys(program.package for program in PROGRAMS.values()))
def test_model_trains_five_steps_with_the_client(package: str, tmp_path: Path, models: Path) -> None:
    """Every step has a group of each API, streamed and not. Trainer and server agree about each of their tokens.

    The servers are real. The client is a process of its own environment in every rollout. Of its first two calls one is
    cancelled or its answer lost, and the answer to the other is lost: it repeats them.
    """
    run_dir = tmp_path / "run"
    names = ways(package)
    # A step is of one epoch.
    groups = train(package, run_dir, models, "schedule=conventional", f"finetune.max_train_steps={STEPS}")
    points = [point for point in read_metrics(run_dir, "finetune") if "logratio_abs_max" in point]
    assert [point["step"] for point in points] == list(range(1, STEPS + 1))
    assert {point["lag_max"] for point in points} == {0}
    assert max(point["logratio_abs_max"] for point in points) <= 2e-5
    ledger = read_ledger(run_dir)
    assert ledger.violations == ()
    way_of = {group.group_id: group.dataset for group in groups}
    trained = Counter(
        (entry.step, way_of[entry.sample_id.rpartition("/")[0]])
        for entry in ledger.entries
        if entry.outcome == "trained"
    )
    assert trained == {(step, name): ATTEMPTS for step in range(STEPS) for name in names}
    met = [rollout.metrics for group in groups for rollout in group.rollouts]
    assert all(one["num_cancelled"] + one["num_repeated"] >= 2 for one in met)
    assert sum(one["num_cancelled"] for one in met) > 0
    if package not in OWN_PROMPTS:
        assert sum(one["num_parallel"] for one in met) > 0
        assert sum(one["num_sub_agent"] for one in met) > 0


@needs_clients
@pytest.mark.slow
@pytest.mark.timeout(RUN_TIMEOUT_S + 60)
@pytest.mark.parametrize("package", ["openai", "anthropic"])
def test_versions_change_under_a_streaming_client(package: str, tmp_path: Path, models: Path) -> None:
    """The trainer runs beside the rollouts: streamed answers are of several versions, some older than their step."""
    run_dir = tmp_path / "run"
    groups = train(package, run_dir, models, "finetune.max_train_steps=8")
    ledger = read_ledger(run_dir)
    assert ledger.violations == ()
    assert max(point["lag_max"] for point in read_metrics(run_dir, "finetune") if "lag_max" in point) > 0
    streamed = [rollout for group in groups if group.dataset.endswith("-stream") for rollout in group.rollouts]
    assert len({version for rollout in streamed for one in rollout.sequences for version in one.spans[:, 2]}) > 1
