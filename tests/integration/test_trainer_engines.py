"""Engines and rank counts: same steps, same losses; saved by one, resumed by another. Gloo on this machine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.engine_runs import ENGINES, run_ranks, trainer_imported
from tests.models import make_mixture, save_qwen2, save_with_words
from tests.rank_processes import call_on_ranks
from tests.ranks import trainer_rank

STEPS, HALF = 20, 10


@pytest.fixture(scope="module", autouse=True)
def imported_once() -> Iterator[None]:
    with trainer_imported():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen2(tmp_path_factory.mktemp("model"), vocab_size=64)


class Runs:
    """Whole runs of 20 steps, each made once: metrics in `<engine>/out.json`, the state after step 10 beside it."""

    def __init__(self, root: Path, model: Path):
        self._root, self._model = root, model
        self._done: dict[str, Path] = {}

    def folder(self, engine: str, world_size: int) -> Path:
        key = f"{engine}-{world_size}"
        if key not in self._done:
            folder = self._root / key
            folder.mkdir()
            run_ranks(
                folder / "out.json",
                world_size,
                engine,
                self._model,
                steps=[0, STEPS],
                save_at=HALF,
                save=str(folder),
            )
            self._done[key] = folder
        return self._done[key]

    def metrics(self, engine: str, world_size: int) -> list[dict[str, float]]:
        return json.loads((self.folder(engine, world_size) / "out.json").read_text())


@pytest.fixture(scope="module")
def runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), model)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("engine", "ranks"),
    [
        *[("zero3", 2), ("fsdp2", 2), ("fsdp2_offload", 2), ("ddp", 2)],
        *[slow("fsdp2_shards", 2), slow("zero1", 2), slow("zero2", 2)],
        ("hsdp", 4),
        *[slow(engine, 4) for engine in ENGINES],
        *[slow("zero2", 1), slow("zero3", 1), slow("fsdp2", 1)],
    ],
)
def test_losses_of_every_step_are_those_of_one_rank(engine: str, ranks: int, runs: Runs) -> None:
    ours, expected = runs.metrics(engine, ranks), runs.metrics("ddp", 1)
    for step, (mine, theirs) in enumerate(zip(ours, expected, strict=True)):
        for name in ("loss", "grad_norm", "entropy", "ess"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-5), f"step {step} {name}"
        assert mine["tokens"] == theirs["tokens"]
    weights = load_file(runs.folder(engine, ranks) / "out.safetensors")
    wanted = load_file(runs.folder("ddp", 1) / "out.safetensors")
    assert weights.keys() == wanted.keys()
    assert max((weights[name] - wanted[name]).abs().max().item() for name in wanted) <= 1e-4


def test_offloaded_states_and_kept_products_change_no_step(runs: Runs) -> None:
    """Beside FSDP2 that offloads nothing, keeps all activations, and reduces once per step."""
    ours, expected = runs.metrics("fsdp2_offload", 2), runs.metrics("fsdp2", 2)
    for step, (mine, theirs) in enumerate(zip(ours, expected, strict=True)):
        for name in ("loss", "grad_norm"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-6, abs=1e-6), f"step {step} {name}"


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_overflow_of_one_rank_skips_the_step_and_halves_the_scale_on_all(
    engine: str, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    call_on_ranks(trainer_rank.skip_overflow, {"engine": engine, "model": str(model), "out": str(out)}, out, 2)
    seen, other = (json.loads(Path(f"{out}.{rank}").read_text()) for rank in (0, 1))
    assert seen == other
    assert [row[:4] for row in seen] == [[1024, 1, 0, 1024], [512, 0, 1, 512], [512, 1, 1, 512]]
    first, skipped, last = (row[4] for row in seen)
    assert first == skipped != last


@pytest.mark.parametrize(
    ("writer", "writer_ranks", "reader", "reader_ranks"),
    [
        ("zero3", 2, "fsdp2", 2),
        ("fsdp2", 2, "ddp", 1),
        ("fsdp2_offload", 2, "fsdp2_offload", 1),
        *[slow("hsdp", 4, "fsdp2", 2), slow("ddp", 2, "hsdp", 4)],
        *[slow("ddp", 2, "zero3", 2), slow("ddp", 2, "zero2", 2)],
        *[slow("zero3", 4, "zero3", 2), slow("zero2", 4, "fsdp2", 2), slow("fsdp2", 4, "zero2", 2)],
        *[slow("zero3", 2, "zero2", 4), slow("fsdp2", 2, "zero3", 4), slow("zero2", 2, "fsdp2", 4)],
    ],
)
def test_saved_by_one_engine_and_rank_count_resumed_by_another(
    writer: str, writer_ranks: int, reader: str, reader_ranks: int, runs: Runs, model: Path, tmp_path: Path
) -> None:
    saved = str(runs.folder(writer, writer_ranks))
    ours = run_ranks(tmp_path / "out.json", reader_ranks, reader, model, steps=[HALF, STEPS], load=saved)
    for mine, theirs in zip(ours, runs.metrics("ddp", 1)[HALF:], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("loss", "engine", "ranks", "sharing"),
    [
        ("gspo", "ddp", 2, 2),
        *[
            slow("reinforce", "ddp", 2, 2),
            slow("reinforce", "fsdp2", 4, 4),
            slow("gspo", "zero3", 4, 4),
            slow("reinforce", "zero3", 4, 2),
        ],
    ],
)
def test_ranks_sharing_each_sequence_have_the_losses_of_one(
    loss: str, engine: str, ranks: int, sharing: int, model: Path, tmp_path: Path
) -> None:
    overrides = [f"finetune.rl.policy_loss={loss}", "finetune.rl.entropy_bonus=0.01", "finetune.head_chunk_tokens=8"]
    overrides += ["finetune.rl.sequence_mis=2.0"] if loss == "gspo" else []
    shared = [*overrides, f"finetune.seq_parallel={sharing}", "finetune.gradient_checkpointing=true"]
    expected = run_ranks(tmp_path / "one.json", 1, "ddp", model, steps=[0, 6], overrides=overrides)
    ours = run_ranks(tmp_path / "shared.json", ranks, engine, model, steps=[0, 6], overrides=shared)
    for step, (mine, theirs) in enumerate(zip(ours, expected, strict=True)):
        for name in ("loss", "grad_norm", "entropy", "ess", "ess_sequence", "reward", "clip_fraction", "sequences"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-5), f"step {step} {name}"
        assert mine["tokens"] == theirs["tokens"]
        assert mine["input_tokens"] == theirs["input_tokens"]


@pytest.mark.parametrize("engine", ["fsdp2", slow("fsdp2_shards"), slow("zero2"), slow("zero3")])
def test_adapters_have_the_losses_of_one_rank_and_resume_on_it(engine: str, model: Path, tmp_path: Path) -> None:
    """The base is streamed into FSDP2's shards, only adapters are in the checkpoint, and they are exported whole."""
    overrides, folders = ["finetune.lora.enabled=true", "finetune.lora.r=4"], (tmp_path / "alone", tmp_path)
    save = [{"save_at": 3, "save": str(folder), "overrides": list(overrides)} for folder in folders]
    expected = run_ranks(tmp_path / "one.json", 1, "ddp", model, steps=[0, 6], **save[0])
    ours = run_ranks(tmp_path / "two.json", 2, engine, model, steps=[0, 3], **save[1])
    one, two = (load_file(folder / "exports/step_3/adapter/adapter_model.safetensors") for folder in folders)
    assert one.keys() == two.keys()
    assert max((one[name] - two[name]).abs().max() for name in one) <= 1e-5
    ours += run_ranks(tmp_path / "resumed.json", 1, "ddp", model, steps=[3, 6], load=str(tmp_path), overrides=overrides)
    for step, (mine, theirs) in enumerate(zip(ours, expected, strict=True)):
        for name in ("loss", "grad_norm", "entropy"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-5), f"step {step} {name}"


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "ranks"), [("ddp", 1), ("fsdp2", 2), ("zero2", 2)])
def test_compiled_layers_have_the_losses_of_layers_that_are_not(
    engine: str, ranks: int, runs: Runs, model: Path, tmp_path: Path
) -> None:
    ours = run_ranks(tmp_path / "out.json", ranks, engine, model, steps=[0, 6], overrides=["finetune.compile=true"])
    for mine, theirs in zip(ours, runs.metrics("ddp", 1)[:6], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=1e-4)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero2", slow("zero3")])
def test_every_engine_multiplies_experts_in_bfloat16(engine: str, tmp_path: Path) -> None:
    model, out = save_with_words(make_mixture(64), tmp_path / "model"), tmp_path / "out.json"
    run_ranks(out, 1, engine, model, steps=[0, 1], overrides=["finetune.dtype=bfloat16"])
    assert out.with_suffix(".experts").read_text() == "torch.bfloat16"
