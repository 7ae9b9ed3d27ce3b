"""docs/objectives.md as it is written: its loss and its advantage run, and what is wrong with one is said."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pipelinerl.config.load import compose, parse, to_container
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.rl.objective import LossSettings, policy_term
from pipelinerl.finetune.rl.tokens import TokenInputs
from pipelinerl.inspect.report import read_summary
from pipelinerl.launcher import objective_check, preflight
from pipelinerl.observability.metrics import read_metrics
from pipelinerl.preprocess.advantages import group_advantages

PAGE = Path(__file__).resolve().parents[2] / "docs" / "objectives.md"
BLOCK = re.compile(r"^```python\n# (\w+)\.py\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, code in BLOCK.findall(PAGE.read_text()):
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{PAGE.parents[1]}")
    return tmp_path


def config(*overrides: str) -> Config:
    required = ["output_dir=x", "dataset_loader=a.b", "actor.rollout_policy=a.b"]
    return parse(compose("base", [*required, *overrides]))


def inputs(ratios: list[float], advantages: list[float]) -> tuple[torch.Tensor, TokenInputs]:
    logprobs = torch.full((len(ratios),), -2.0, dtype=torch.float64, requires_grad=True)
    return logprobs, TokenInputs(
        sampler_logprobs_K=logprobs.detach() - torch.tensor(ratios, dtype=torch.float64).log(),
        advantages_K=torch.tensor(advantages, dtype=torch.float64),
        weights_K=torch.ones(len(ratios)),
        segments_K=torch.zeros(len(ratios), dtype=torch.int64),
        num_segments=1,
    )


def test_page_loss_has_ten_lines_and_the_numbers_it_says(modules: Path) -> None:
    code = (modules / "my_loss.py").read_text()
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    logprobs, tokens = inputs([0.5, 1.2, 4.0, 4.0], [1.0, 1.0, 1.0, -1.0])
    settings = LossSettings(policy_loss="my_loss.one_sided", policy_loss_kwargs={"floor": 0.6}, epsilon_high=0.3)
    assert not settings.sequence_level
    loss, _ = policy_term(logprobs, tokens, settings)
    (gradient,) = torch.autograd.grad(loss.losses_K.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([-0.6, -1.2, 0.0, 4.0])
    assert loss.clipped_K is not None
    assert loss.clipped_K.tolist() == [False, False, True, False]


def test_page_loss_takes_corrections(modules: Path) -> None:
    logprobs, tokens = inputs([4.0], [-1.0])
    loss, _ = policy_term(logprobs, tokens, LossSettings(policy_loss="my_loss.one_sided", token_tis=2.0))
    assert torch.autograd.grad(loss.losses_K.sum(), logprobs)[0].tolist() == pytest.approx([2.0])


def test_page_advantage_runs(modules: Path) -> None:
    found = group_advantages(np.array([0.0, 1.0, 5.0]), "my_advantage.median_baseline", {"scale": 2.0})
    assert found.tolist() == [-2.0, 0.0, 8.0]


def test_page_functions_pass_the_trial_before_the_start(modules: Path) -> None:
    own = [
        *("finetune.rl.policy_loss=my_loss.one_sided", "+finetune.rl.policy_loss_kwargs.floor=0.01"),
        *("finetune.rl.advantage=my_advantage.median_baseline", "+finetune.rl.advantage_kwargs.scale=2.0"),
    ]
    required = ["output_dir=x", "dataset_loader=a.b", "actor.rollout_policy=a.b"]
    container = to_container(compose("base", [*required, *own]))
    preflight.check_own_objective(config(*own), container)
    container["finetune"]["rl"]["policy_loss"] = "my_loss.missing"
    with pytest.raises(ConfigError, match=r"my_loss\.missing.*has no 'missing'"):
        preflight.check_own_objective(config(*own), container)


WRONG = {
    "mean": ("def wrong(logprobs_K, tokens): return (tokens.weight_K * logprobs_K).mean()", "one per token"),
    "constant": ("def wrong(logprobs_K, tokens): return tokens.mask_K * logprobs_K.detach()", "no gradient"),
    "argument": ("def wrong(logprobs_K, tokens, *, unheard): return tokens.mask_K * logprobs_K", "unheard` is missing"),
    "infinite": ("def wrong(logprobs_K, tokens): return tokens.mask_K * logprobs_K / 0", "inf"),
    "correction": ("def wrong(logprobs_K, tokens): return logprobs_K * 1", "would have no effect"),
    "raises": ("def wrong(logprobs_K, tokens): raise KeyError('x')", "KeyError"),
}


@pytest.mark.parametrize("case", WRONG)
def test_loss_that_cannot_be_trained_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    code, message = WRONG[case]
    (tmp_path / f"wrong_{case}.py").write_text(code + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    cfg = config(f"finetune.rl.policy_loss=wrong_{case}.wrong", "finetune.rl.veto=1e-4")
    with pytest.raises(ConfigError, match=rf"finetune.rl.policy_loss` is wrong_{case}.*{message}"):
        objective_check.check_objective(cfg)


def test_every_builtin_loss_declares_the_keys_that_it_takes() -> None:
    from pipelinerl.config.objectives import ADVANTAGES, POLICY_LOSSES, keyword_parameters
    from pipelinerl.finetune.rl.objective import find_loss
    from pipelinerl.preprocess.advantages import find_advantage

    fields = {field.name for field in dataclasses.fields(LossSettings)}
    for name, entry in POLICY_LOSSES.items():
        assert tuple(parameter.name for parameter in keyword_parameters(find_loss(name))) == entry.keys
        assert set(entry.keys) <= fields
    assert all(callable(find_advantage(name)) for name in ADVANTAGES)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_page_loss_trains_the_quickstart(modules: Path) -> None:
    """The page's own command."""
    command = [sys.executable, "-m", "pipelinerl.launch", "--config-name=quickstart", "output_dir=run"]
    own = ["finetune.rl.policy_loss=my_loss.one_sided", "finetune.rl.epsilon_high=0.3"]
    kwargs = "+finetune.rl.policy_loss_kwargs.floor=0.01"
    done = subprocess.run(
        [*command, *own, kwargs], cwd=modules, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = read_summary(modules / "run")
    assert summary is not None
    assert summary["success_after"] >= summary["success_before"] + 0.25
    assert any("clip_fraction" in point for point in read_metrics(modules / "run", "finetune"))
