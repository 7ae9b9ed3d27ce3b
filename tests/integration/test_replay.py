"""`pipelinerl replay` on runs of the real trainer on CPU: its figures bit for bit, and each token's part of them."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from benchmarks.receivers import forkserver
from benchmarks.synthetic_batches import make_samples, pack, split_evenly
from pipelinerl.config.load import compose, load_old_run, parse, to_container
from pipelinerl.errors import CheckpointError, ConfigError, StreamError
from pipelinerl.finetune.loop import Trainer
from pipelinerl.inspect.reading import look_into
from pipelinerl.inspect.replay import folder as files
from pipelinerl.inspect.replay.__main__ import computed, main
from pipelinerl.inspect.replay.compare import StepComparison, compare_step
from pipelinerl.inspect.replay.folder import StepBatches
from pipelinerl.inspect.replay.inputs import TIMINGS, checkpoint_before, collect_inputs, recorded
from pipelinerl.records import MicroBatch
from pipelinerl.streams import SingleStreamSpec, open_writer, set_streams_backend
from pipelinerl.world import Job, Node, WorldMap
from tests.models import save_qwen2
from tests.rank_processes import call_on_ranks
from tests.ranks import trainer_role
from tests.says import says
from tests.trainer_kit import FakeSender, trainer_context, trainer_overrides

VOCAB, STEPS = 64, 6
ROOT = Path(__file__).resolve().parents[2]
Capture = pytest.CaptureFixture[str]


def prepare(run_dir: Path, *overrides: str, ranks: int = 1, steps: range = range(STEPS)) -> list[str]:
    """The run folder of a trainer that has not begun; returns its whole configuration as overrides."""
    save_qwen2(run_dir / "model", VOCAB)
    steps_given = (f"finetune.max_train_steps={STEPS}", "finetune.save_checkpoint_steps=2")
    given = trainer_overrides(run_dir, *steps_given, *overrides)
    (run_dir / "conf").mkdir()
    OmegaConf.save(OmegaConf.create(to_container(compose("base", given))), run_dir / "conf" / "config.yaml")
    world = WorldMap(
        accelerator="cpu",
        nodes=(Node(rank=0, hostname="127.0.0.1", devices=2),),
        jobs=(Job(name="finetune_0", kind="finetune", cores=(0,), num_ranks=ranks),),
        master_port=1,
        weight_port=2,
        weight_ports=1,
    )
    world.save(run_dir)
    set_streams_backend("files")
    writers = [open_writer(SingleStreamSpec(run_dir, "training_data", 0, rank), MicroBatch) for rank in range(ranks)]
    for step in steps:
        samples = make_samples(0, 8, vocab_size=VOCAB, lengths=(5, 9), step=step, max_lag=2)
        rank_of = [number % ranks for number in range(2 * ranks)]
        for rank, record in zip(
            rank_of, pack(samples, split_evenly(8, 2 * ranks), step, rank_of=rank_of, ref=False), strict=True
        ):
            writers[rank].write(record)
    for writer in writers:
        writer.close()
    return given


def train(run_dir: Path, *overrides: str) -> Path:
    given = prepare(run_dir, *overrides)
    Trainer(trainer_context(run_dir, parse(compose("base", given))), FakeSender()).run()
    return run_dir


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("run"))


def replayed(capsys: Capture, *arguments: Any) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def altered(run_dir: Path, step: int, change: Callable[[MicroBatch], None]) -> StepComparison:
    """The run's step against one in whose first micro-batch something was changed."""
    with tempfile.TemporaryDirectory() as made:
        with look_into(run_dir):
            plan = collect_inputs(run_dir, step, Path(made))
        path = files.batch_file(Path(made), 0, step)
        batches = files.read_record(path, StepBatches)
        change(batches.records[0])
        files.write_record(path, batches)
        own, _ = computed(Path(made), plan, {})
    return compare_step(recorded(run_dir, step), own)


@pytest.mark.parametrize(("step", "start"), [(5, 4), (4, 4), (3, 0)])
def test_replayed_step_is_the_trainers_bit_for_bit(run_dir: Path, step: int, start: int, capsys: Capture) -> None:
    code, found = replayed(capsys, run_dir, "--step", step)

    assert (code, found["equal"], found["from_checkpoint"]) == (0, True, start)
    assert found["compared"]["metrics"] >= 40
    tokens = sum(len(sequence["losses"]) for sequence in found["run"]["sequences"])
    assert (
        found["compared"]["logprobs"] == found["compared"]["entropies"] == tokens == found["run"]["metrics"]["tokens"]
    )


def test_parts_of_the_tokens_are_the_loss_and_its_slope(run_dir: Path, capsys: Capture) -> None:
    _, found = replayed(capsys, run_dir, "--step", 5)

    total = 0.0
    weights = {s.name: s.weight for s in make_samples(0, 8, vocab_size=VOCAB, lengths=(5, 9), step=5, max_lag=2)}
    for sequence in found["run"]["sequences"]:
        logprobs, sampler = np.array(sequence["logprobs"]), np.array(sequence["sampler_logprobs"])
        ratios = np.exp(logprobs - sampler)
        slopes = -weights[sequence["sequence_id"]] * np.minimum(ratios, 5.0) * np.array(sequence["advantages"])
        np.testing.assert_allclose(sequence["slopes"], slopes, rtol=1e-5)
        np.testing.assert_allclose(sequence["losses"], slopes * logprobs, rtol=1e-5)
        np.testing.assert_allclose(sequence["ratios"], ratios, rtol=1e-6)
        total += sum(sequence["losses"])
    assert total == pytest.approx(found["run"]["metrics"]["loss"], rel=1e-5)


def test_one_altered_token_is_told(run_dir: Path) -> None:
    def another_token(record: MicroBatch) -> None:
        at = int(record.spans[0, 0])
        record.token_ids[at] = (record.token_ids[at] + 1) % VOCAB

    found = altered(run_dir, 5, another_token)

    assert not found.is_equal
    assert {"loss", "grad_norm"} <= found.metrics.keys()
    assert found.sequences == {"5-0/0/0"}


def test_an_altered_advantage_is_told_though_log_probabilities_are_equal(run_dir: Path) -> None:
    def another_advantage(record: MicroBatch) -> None:
        record.advantages[:] *= np.float32(1.0 + 2**-20)

    found = altered(run_dir, 5, another_advantage)

    assert (found.is_equal, found.sequences) == (False, set())
    assert "grad_norm" in found.metrics


def test_with_another_objective_only_its_own_figures_change(run_dir: Path, capsys: Capture) -> None:
    plain = replayed(capsys, run_dir, "--step", 5)[1]
    code, found = replayed(
        capsys,
        run_dir,
        "--step",
        5,
        "--with",
        "policy_loss=ppo",
        "--with",
        "epsilon_low=0.05",
        "--with",
        "epsilon_high=0.05",
    )

    assert code == 0
    for run in (found["run"], plain["run"]):
        run["metrics"] = {name: value for name, value in run["metrics"].items() if name not in TIMINGS}
    assert found["run"] == plain["run"]
    own, other = found["run"], found["with"]
    clipped = 0
    for mine, theirs in zip(own["sequences"], other["sequences"], strict=True):
        assert mine["logprobs"] == theirs["logprobs"]
        ratios, advantages = np.array(mine["ratios"]), np.array(mine["advantages"])
        outside = ((ratios > 1.05) & (advantages > 0)) | ((ratios < 0.95) & (advantages < 0))
        np.testing.assert_array_equal(np.array(theirs["slopes"])[outside], 0.0)
        np.testing.assert_allclose(np.array(theirs["slopes"])[~outside], np.array(mine["slopes"])[~outside], rtol=1e-5)
        clipped += int(outside.sum())
    assert 0 < clipped == round(other["metrics"]["clip_fraction"] * other["metrics"]["tokens"])
    assert own["update_cosine"] == pytest.approx(1.0)
    assert -1.0 < other["update_cosine"] < 0.9999


def test_the_same_objective_a_second_time_is_the_first(run_dir: Path, capsys: Capture) -> None:
    _, found = replayed(capsys, run_dir, "--step", 5, "--with", "policy_loss=reinforce")
    assert found["with"]["sequences"] == found["run"]["sequences"]
    assert found["with"]["update_norm"] == found["run"]["update_norm"]
    assert found["with"]["metrics"]["grad_norm"] == found["run"]["metrics"]["grad_norm"]


def test_common_prefixes_may_be_computed_again(run_dir: Path) -> None:
    cfg = load_old_run(run_dir)
    assert files.changed_settings(cfg, {"share_prefixes": "off", "kl_coef": 0.1}) == {
        "share_prefixes": False,
        "kl_coef": 0.1,
    }
    assert files.changed_settings(cfg, {"share_prefixes": "auto"}) == {"share_prefixes": True}


def test_steps_with_a_shared_proximal_policy_are_replayed_from_their_block(tmp_path: Path, capsys: Capture) -> None:
    every = ["finetune.rl.policy_loss=decoupled_ppo", "finetune.rl.proximal_every=2"]
    code, found = replayed(capsys, train(tmp_path, *every), "--step", 5)
    assert (code, found["from_checkpoint"], found["equal"]) == (0, 4, True)


def test_step_of_a_run_that_resumed_inside_a_block_is_replayed_with_its_proximal_policy(
    tmp_path: Path, capsys: Capture
) -> None:
    """The checkpoint of step 3 holds π_prox of the last step of the block {0, 1, 2, 3}. Step 5 has that of step 4."""
    every = ["finetune.rl.policy_loss=decoupled_ppo", "finetune.rl.proximal_every=4", "finetune.rl.epsilon_high=1e-5"]
    run_dir = stopped_and_resumed(tmp_path, 3, *every, "finetune.save_checkpoint_steps=100")

    code, found = replayed(capsys, run_dir, "--step", 3)
    assert (code, found["from_checkpoint"], found["equal"], found["proximal_made_at"]) == (0, 3, True, 0)
    assert found["run"]["metrics"]["clip_fraction"] > 0
    main([str(run_dir), "--step", "3"])
    said = (
        "its ratio is to the policy before step 0, π_prox of its block, whose log-probabilities are in the checkpoint"
    )
    assert said in capsys.readouterr().out

    code, found = replayed(capsys, run_dir, "--step", 5)
    assert (code, found["from_checkpoint"], found["proximal_made_at"]) == (0, 3, 4)


@pytest.mark.slow
def test_replay_says_when_no_checkpoint_holds_the_proximal_policy(tmp_path: Path, capsys: Capture) -> None:
    """As a version wrote it that did not save π_prox."""
    every = ["finetune.rl.policy_loss=decoupled_ppo", "finetune.rl.proximal_every=4", "finetune.rl.epsilon_high=1e-5"]
    run_dir = stopped_and_resumed(tmp_path, 3, *every, "finetune.save_checkpoint_steps=100")
    manifest = run_dir / "checkpoints" / "step_3" / "manifest.json"
    held = json.loads(manifest.read_text())
    del held["counters"]["proximal_made_at"], held["crc32"]
    manifest.write_text(json.dumps(held))

    code, found = replayed(capsys, run_dir, "--step", 3)
    assert (code, found["equal"], found["proximal_made_at"]) == (1, False, 3)
    main([str(run_dir), "--step", "3"])
    assert "begins with step 0, but no checkpoint holds the rest of it" in capsys.readouterr().out


def stopped_and_resumed(run_dir: Path, step: int, *overrides: str) -> Path:
    given = prepare(run_dir, *overrides)
    ctx = trainer_context(run_dir, parse(compose("base", given)))
    ctx.status.progress = lambda **fields: ctx.stop.set() if fields.get("step") == step else None  # type: ignore[method-assign]
    Trainer(ctx, FakeSender()).run()
    Trainer(trainer_context(run_dir, parse(compose("base", given))), FakeSender()).run()
    return run_dir


def test_checkpoint_inside_a_block_is_used_only_if_there_is_no_other() -> None:
    assert checkpoint_before(9, [3, 5, 8, 11], block=1) == 8
    assert checkpoint_before(9, [4, 5, 9], block=4) == 4
    assert checkpoint_before(9, [5, 9], block=4) == 9
    assert checkpoint_before(9, [11], block=1) == 0
    assert checkpoint_before(9, [4, 5, 7, 9], block=4, usable=[7]) == 7
    assert checkpoint_before(9, [4, 9], block=4, usable=[9]) == 9


def test_gap_is_split_with_the_weights_that_sampled(run_dir: Path, capsys: Capture) -> None:
    _, found = replayed(capsys, run_dir, "--step", 5, "--mismatch")

    lm = AutoModelForCausalLM.from_pretrained(run_dir / "exports" / "step_4", dtype=torch.float32)
    samples = {s.name: s for s in make_samples(0, 8, vocab_size=VOCAB, lengths=(5, 9), step=5, max_lag=2)}
    counts = {3: 0, 4: 0, 5: 0}
    for sequence in found["run"]["sequences"]:
        ids = torch.from_numpy(samples[sequence["sequence_id"]].token_ids).long()[None]
        with torch.no_grad():
            scored = lm(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        for place, version, own, new in zip(
            *(sequence[name] for name in ("positions", "versions", "version_logprobs", "logprobs")), strict=True
        ):
            counts[version] += 1
            if version == 3:
                assert own == "nan"
            else:
                assert own == pytest.approx(new if version == 5 else float(scored[place - 1]), abs=1e-5)
    assert min(counts.values()) > 0
    split = found["mismatch"]
    assert (split["known"], split["unknown"]) == (counts[4] + counts[5], counts[3])
    assert found["cause"] == "precision"  # the recorded sampler of this data is noise
    assert found["equal"] is True


def test_text_names_the_tokens(run_dir: Path, capsys: Capture) -> None:
    assert main([str(run_dir), "--step", "5", "--tokens", "3", "--with", "policy_loss=ppo"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("step 5: 8 sequences, ")
    assert "EQUAL to the run, bit for bit" in out
    assert "from the checkpoint of step 4, after training 1 step again" in out
    assert "cosine" in out
    assert out.count("5-") >= 6


def test_what_is_missing_is_said(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says("4 to 5")):
        main([str(run_dir)])
    with pytest.raises(CheckpointError, match=says("step 6", "the stream ends")):
        main([str(run_dir), "--step", "6"])
    with pytest.raises(ConfigError, match=says("--with learning_rate", "setting of the loss")):
        main([str(run_dir), "--step", "5", "--with", "learning_rate=1"])
    (tmp_path / "text").write_text("no folder")
    with pytest.raises(StreamError, match="not a run folder"):
        main([str(tmp_path / "text")])
    trimmed = tmp_path / "trimmed"
    prepare(trimmed, steps=range(2, STEPS))
    with pytest.raises(CheckpointError, match=says("step 0", "keep_checkpoints")):
        main([str(trimmed), "--step", "3"])


def test_damaged_checkpoint_is_refused(run_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run_dir, copy)
    shard = next((copy / "checkpoints" / "step_4").glob("*.safetensors"))
    with open(shard, "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\xff\xff\xff\xff")
    with pytest.raises(CheckpointError, match="checkpoint of step 4 is damaged"):
        main([str(copy), "--step", "5"])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_two_ranks_are_replayed_on_two_ranks(engine: str, tmp_path: Path, capsys: Capture) -> None:
    given = prepare(tmp_path, f"finetune.engine={engine}", ranks=2)
    with forkserver(trainer_role.__name__):
        call_on_ranks(trainer_role.main, {"run_dir": str(tmp_path), "overrides": given}, tmp_path / "trainer", 2)

    code, found = replayed(capsys, tmp_path, "--step", 5, "--with", "policy_loss=ppo")
    assert (code, found["ranks"], found["equal"]) == (0, 2, True)
    assert len(found["run"]["sequences"]) == 8
    assert found["with"]["update_cosine"] <= 1.0
