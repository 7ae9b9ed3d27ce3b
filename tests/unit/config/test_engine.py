"""Which engine trains."""

import pytest

from pipelinerl.config.engine import check_ranks, deepspeed_file, engine_of, zero_stage
from pipelinerl.config.load import compose, parse
from pipelinerl.config.objectives import TOKEN_ARGUMENTS
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.rl.objective import NEEDED
from tests.says import says

REQUIRED = ["output_dir=x", "dataset_loader=a.load", "actor.rollout_policy=a.rollout"]


@pytest.mark.parametrize(
    ("overrides", "ranks", "engine"),
    [
        ([], 1, "ddp"),
        ([], 2, "deepspeed"),
        (["finetune.dtype=float16"], 1, "ddp"),
        (["finetune.dtype=float16"], 2, "fsdp2"),
        (["use_deepspeed=false"], 2, "ddp"),
        (["use_deepspeed=false", "use_fsdp=true"], 2, "fsdp2"),
        (["use_deepspeed=false", "use_fsdp=true"], 1, "fsdp2"),
        (["use_deepspeed=false", "finetune.cpu_offload=true"], 1, "ddp"),
        (["finetune.engine=fsdp2"], 1, "fsdp2"),
    ],
)
def test_engine_of(overrides: list[str], ranks: int, engine: str) -> None:
    assert engine_of(parse(compose("base", [*REQUIRED, *overrides])), ranks) == engine


def test_deepspeed_is_refused_in_float16() -> None:
    cfg = parse(compose("base", [*REQUIRED, "finetune.dtype=float16", "finetune.engine=deepspeed"]))
    with pytest.raises(ConfigError, match=says("`finetune.dtype` is float16", "set `finetune.engine` to fsdp2 or ddp")):
        check_ranks(cfg, 2)


def test_deepspeed_file_may_lie_anywhere(tmp_path) -> None:
    (tmp_path / "own.json").write_text('{"zero_optimization": {"stage": 1}}')
    own = parse(compose("base", [*REQUIRED, f"deepspeed_config={tmp_path}/own"]))
    assert deepspeed_file(own) == tmp_path / "own.json"
    assert zero_stage(own) == 1
    assert zero_stage(parse(compose("base", REQUIRED))) == 3
    assert zero_stage(parse(compose("base", [*REQUIRED, "deepspeed_config=nowhere"]))) == 0


def test_every_figure_that_a_loss_may_name_says_what_computes_it() -> None:
    assert set(NEEDED) == set(TOKEN_ARGUMENTS)
