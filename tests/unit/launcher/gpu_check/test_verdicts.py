"""What the facts of a check mean, and what a run's folder says."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipelinerl.config.load import compose
from pipelinerl.inspect.finding import Level
from pipelinerl.launcher.gpu_check import __main__ as command
from pipelinerl.launcher.gpu_check import verdicts
from pipelinerl.launcher.gpu_check.checks import CHECKS, GpuCheck, launch, trial
from pipelinerl.launcher.gpu_check.machine import REAL_SHAPE, CudaMeter, Machine
from pipelinerl.launcher.gpu_check.run_facts import run_facts
from pipelinerl.plan.speed import gpu_named, training_rate

CARD = Machine(accelerator="cuda", name="NVIDIA H100 80GB HBM3", devices=1, memory_bytes=80 * 2**30)
STEP = {
    "tokens": 12_000,
    "document_tokens": 3000,
    "engine": "ddp",
    "attention": "packed",
    "loss_is_finite": True,
    "peak_bytes": 10 * 2**30,
    "planned_bytes": 10 * 2**30,
}


def trainer(**changed: Any) -> list[str]:
    """The outcomes for speed and memory of a step at the predicted speed, changed."""
    predicted = training_rate(REAL_SHAPE, gpu_named(CARD.name)[1], 3000, recomputed=True)
    return [one.level.word for one in verdicts.judge_trainer(CARD, STEP | {"tokens_per_s": predicted} | changed)]


def test_a_step_as_predicted_passes() -> None:
    assert trainer() == ["passed", "passed"]


def test_a_step_at_less_than_half_of_the_prediction_is_slow() -> None:
    predicted = training_rate(REAL_SHAPE, gpu_named(CARD.name)[1], 3000, recomputed=True)
    assert trainer(tokens_per_s=0.51 * predicted) == ["passed", "passed"]
    assert trainer(tokens_per_s=0.49 * predicted) == ["slow", "passed"]


def test_a_step_that_needs_more_memory_than_planned_fails() -> None:
    assert trainer(peak_bytes=int(1.14 * 10 * 2**30)) == ["passed", "passed"]
    assert trainer(peak_bytes=int(1.16 * 10 * 2**30)) == ["passed", "failed"]


def test_a_step_of_a_card_without_data_sheet_is_noted_without_a_prediction() -> None:
    card = msgspec.structs.replace(CARD, name="NVIDIA GH200 480GB")
    [speed, memory] = verdicts.judge_trainer(card, STEP | {"tokens_per_s": 1.0})
    assert (speed.level, memory.level) == (Level.NOTED, Level.PASSED)
    assert speed.evidence == "1 tokens/s; packed, ddp; the data sheet of NVIDIA GH200 480GB is not known"
    [speed, _] = verdicts.judge_trainer(card, STEP | {"tokens_per_s": 1.0, "loss_is_finite": False})
    assert speed.level is Level.FAILED


def test_a_loss_that_is_not_finite_fails_however_fast() -> None:
    assert trainer(loss_is_finite=False)[0] == "failed"


def test_mfu_counts_six_operations_per_parameter_and_token() -> None:
    [speed, _] = verdicts.judge_trainer(CARD, STEP | {"tokens_per_s": 50_000.0})
    share = 6 * 494_032_768 * 50_000 / 989e12  # Qwen2.5-0.5B without the biases of its attention
    assert speed.evidence.split("; ")[0] == f"50,000 tokens/s, MFU {share:.1%}"


@pytest.mark.parametrize(
    ("pauses", "planned", "outcome"),
    [([40.0, 50.0, 300.0], 30.0, "passed"), ([70.0], 30.0, "slow"), ([70.0], None, "noted"), ([], 30.0, "failed")],
)
def test_the_median_pause_is_compared_with_the_plan(pauses: list[float], planned: float | None, outcome: str) -> None:
    assert verdicts.judge_pause(pauses, planned).level.word == outcome


@pytest.mark.parametrize(("noise", "outcome"), [([0.02, 0.19], "passed"), ([0.02, 0.21], "failed"), ([], "failed")])
def test_the_largest_noise_is_compared_with_what_is_allowed(noise: list[float], outcome: str) -> None:
    assert verdicts.judge_noise(noise, 0.2).level.word == outcome


def test_a_check_that_was_not_run_or_failed_is_judged_by_its_reason_alone() -> None:
    not_run = verdicts.failed("serving", {"not_run": "no time"})
    broken = verdicts.failed("serving", {"problem": "ended with 9"})
    assert not_run is not None
    assert broken is not None
    assert (not_run.level, not_run.evidence) == (Level.NOT_RUN, "no time")
    assert (broken.level, broken.evidence) == (Level.FAILED, "ended with 9")
    assert verdicts.failed("serving", {"problem": ""}) is None


SERVER_LOG = """\
INFO Using FLASH_ATTN attention backend out of potential backends
INFO Graph capturing finished in 12 secs
I event=weights_live version=0 pause_ms=90.0 swap_ms=80.0 transfer_ms=1.0 prepare_ms=1.0 staged_bytes=5
I event=weights_live version=1 pause_ms=12.5 swap_ms=10.0 transfer_ms=1.0 prepare_ms=1.0 staged_bytes=5
"""
TRAINER_LOG = """\
I event=server_scored server=actor_llm_0 version=1 0.0123 nats, 0.2 are allowed, 0.98 of the trainer's change
I event=server_scored server=actor_llm_0 version=2 1.5e-05 nats, 0.2 are allowed
"""


def write_run(folder: Path, server: str = SERVER_LOG, trainer: str = TRAINER_LOG) -> Path:
    for job, text in (("actor_llm_0", server), ("finetune_0", trainer)):
        (folder / job).mkdir(parents=True)
        (folder / job / "log.txt").write_text(text)
    (folder / "summary.json").write_text(json.dumps({"success_before": 0.25, "success_after": 0.75}))
    return folder


def test_a_run_folder_gives_pauses_noise_graphs_and_backend(tmp_path: Path) -> None:
    facts = run_facts(write_run(tmp_path))
    assert facts["pauses_ms"] == [12.5], "version 0 finds no request and says nothing about the pause"
    assert facts["noise"] == [0.0123, 1.5e-05]
    assert facts["noise_limit"] == 0.2
    assert facts["swaps"] == 2
    assert facts["has_graphs"]
    assert facts["attention_backend"] == "FLASH_ATTN"
    assert (facts["success_before"], facts["success_after"]) == (0.25, 0.75)
    assert facts["faults"] == []
    assert facts["curve"] == []


def test_a_fault_in_a_log_fails_the_swaps(tmp_path: Path) -> None:
    facts = run_facts(write_run(tmp_path, trainer="E event=probe_missed server=actor_llm_0 version=3 final=False\n"))
    assert verdicts.judge_swaps("swaps", facts).level.word == "failed"


@pytest.mark.parametrize(
    ("steps", "after", "outcome"), [(160, 0.46, "passed"), (160, 0.44, "failed"), (12, 0.4, "noted")]
)
def test_a_whole_quickstart_must_learn(steps: int, after: float, outcome: str, tmp_path: Path) -> None:
    facts = run_facts(write_run(tmp_path)) | {"steps": steps, "success_after": after, "name": "quickstart"}
    assert [one.level.word for one in verdicts.judge_quickstart(CARD, facts)] == [outcome, "passed"]


@pytest.mark.parametrize(("steps", "after", "outcome"), [(60, 0.26, "passed"), (60, 0.24, "failed"), (1, 0.5, "noted")])
def test_words_must_learn_and_show_the_curve(steps: int, after: float, outcome: str, tmp_path: Path) -> None:
    curve = [(0, 0.0, 0.05), (20, 0.05, 0.2), (60, 0.1, after)]
    facts = run_facts(write_run(tmp_path)) | {"steps": steps, "curve": curve}
    [learned, swaps] = verdicts.judge_words(CARD, facts)
    assert (learned.level.word, swaps.level.word) == (outcome, "passed")
    assert f"0: 0.05 (0.00), 20: 0.20 (0.05), 60: {after:.2f} (0.10)" in learned.evidence


def test_words_without_a_model_is_not_run(tmp_path: Path) -> None:
    [words] = [check for check in CHECKS if check.name == "words"]
    [told] = command.verdicts_of(words, CARD, words.facts(CARD, tmp_path, 60))
    assert told.level is Level.NOT_RUN
    assert "make smollm2" in told.evidence


class FakeCuda:
    """The functions of `torch.cuda` that a meter calls, in the order in which it called them."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def reset_peak_memory_stats(self) -> None:
        self.calls.append("reset")

    def max_memory_allocated(self) -> int:
        self.calls.append("peak")
        return 7


def test_the_meter_of_a_gpu_waits_for_it_before_it_reads_clock_and_peak() -> None:
    cuda, seconds = FakeCuda(), list[float]()
    meter = CudaMeter(cuda)
    meter.reset()
    with meter.timed(seconds):
        cuda.calls.append("work")
    assert meter.peak_bytes() == 7
    assert cuda.calls == ["reset", "synchronize", "work", "synchronize", "synchronize", "peak"]
    assert len(seconds) == 1


def test_a_module_that_fails_or_hangs_costs_only_its_own_facts() -> None:
    assert trial("no_such_module", {}, 60)["problem"].startswith("exit code 1: ")
    assert "0.01 s" in trial("machine", "cpu", 0.01)["problem"]
    assert launch(["--config-name=no_such"], 60, {}).startswith("exit code 2: error: ")
    assert launch([], 0.01, {}) == "did not end within 0 s"


def test_checks_without_time_or_cards_are_named_and_the_results_are_kept(tmp_path: Path) -> None:
    two_cards = GpuCheck("communicators", 60, lambda *_: {}, verdicts.judge_communicators, needs_devices=2)
    one_card = GpuCheck("trainer", 60, lambda *_: {"problem": "broken"}, verdicts.judge_trainer)
    facts = {
        "communicators": command.run_check(two_cards, CARD, tmp_path, 100),
        "late": command.run_check(one_card, CARD, tmp_path, 19),
        "trainer": command.run_check(one_card, CARD, tmp_path, 21),
    }
    found = [
        one
        for check, seen in zip((two_cards, one_card, one_card), facts.values(), strict=True)
        for one in command.verdicts_of(check, CARD, seen)
    ]
    assert [one.level.word for one in found] == ["not run", "not run", "failed"]
    command.write_results(tmp_path / "found", CARD, found, facts, 12.3)
    assert json.loads((tmp_path / "found.json").read_text())["verdicts"][2]["evidence"] == "broken"
    page = (tmp_path / "found.txt").read_text()
    assert "NVIDIA H100 80GB HBM3 (1 × 80 GiB)" in page
    assert "2 not run, 1 failed" in page


def test_recorded_facts_of_a_card_are_judged_as_then() -> None:
    recorded = json.loads((Path(__file__).parents[4] / "benchmarks" / "gpu_check_h200.json").read_text())
    machine, facts = msgspec.convert(recorded["machine"], Machine), recorded["facts"]
    judged = verdicts.judge_imports(facts["imports"])
    for check in (check for check in CHECKS if check.name in facts):  # `words` came later
        judged += command.verdicts_of(check, machine, facts[check.name])
    said = [
        (
            then["outcome"],
            then["check"],
            [then["measured"], then["planned"] and f"planned {then['planned']}", then["note"]],
        )
        for then in recorded["verdicts"]
    ]
    assert [(one.level.word, one.title, one.evidence) for one in judged] == [
        (outcome, check, "; ".join(filter(None, words))) for outcome, check, words in said
    ]


def test_runs_on_a_gpu_move_weights_in_the_buckets_of_gpus() -> None:
    """The quickstart's are for a model of 0.1M parameters: 0.5B took 0.6 s in 250 of them on an H200."""
    run = compose("quickstart", list(CARD.run_options))
    assert run.finetune.max_train_steps == verdicts.LEARNING_STEPS, "a shorter quickstart has not learned"
    assert run.weights.bucket_mb == compose("base", []).weights.bucket_mb > compose("quickstart", []).weights.bucket_mb
