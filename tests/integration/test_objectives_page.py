"""docs/objectives.md as it is written: its loss and its advantage run, and what is wrong with one is said."""

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pipelinerl.config.load import compose, parse, to_container
from pipelinerl.config.objectives import ADVANTAGES, CORRECTIONS, POLICY_LOSSES, BuiltInLoss, loss_signature
from pipelinerl.config.rules.objective import objective_is_default, ratio_is_counted_once
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.rl.corrections import Corrections
from pipelinerl.finetune.rl.objective import LossSettings, find_loss, policy_term
from pipelinerl.finetune.rl.tokens import TokenInputs
from pipelinerl.inspect.report import read_summary
from pipelinerl.launcher import objective_check, preflight
from pipelinerl.observability.metrics import read_metrics
from pipelinerl.preprocess.advantages import find_advantage, group_advantages
from pipelinerl.testing.losses import check_loss, compare_with_one_at_a_time

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


def test_page_ppo_ewma_clips_to_the_average_policy_between_sampler_and_now(modules: Path) -> None:
    """β = ½: mean ages 0, ½ and ¾ at lags 0, 1, 2, so log π_prox lies 0, ½ and ⅜ of the way from log π to log μ."""
    logprobs, tokens = inputs([np.exp(0.4)] * 4, [1.0, 1.0, 1.0, -1.0])
    tokens = dataclasses.replace(tokens, lag_K=torch.tensor([0, 1, 2, 1]))
    settings = LossSettings(policy_loss="my_ewma.ppo_ewma", policy_loss_kwargs={"decay": 0.5, "most": 1.25})
    loss, _ = policy_term(logprobs, tokens, settings)
    (gradient,) = torch.autograd.grad(loss.losses_K.sum(), logprobs)
    assert loss.clipped_K is not None
    assert loss.clipped_K.tolist() == [False, True, False, True]
    assert gradient.tolist() == pytest.approx([-1.25, 0.0, -1.25 * np.exp(0.15), np.exp(0.4)])


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
    preflight.check_objective(config(*own), container)
    for example in ("my_ewma.ppo_ewma", "my_forks.forks"):
        objective_check.check_objective(config(f"finetune.rl.policy_loss={example}"))
    container["finetune"]["rl"]["policy_loss"] = "my_loss.missing"
    with pytest.raises(ConfigError, match=r"my_loss\.missing.*has no 'missing'"):
        preflight.check_objective(config(*own), container)


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


SECRETLY_WHOLE = {
    "mean": "tokens.weight_K * logprobs_K - tokens.weight_K * logprobs_K.mean()",
    "sequence_mean": "tokens.weight_K * tokens.sequence_mean(logprobs_K)",
    "normalised_advantages": "tokens.weight_K * (tokens.advantages_K - tokens.advantages_K.mean()) * logprobs_K",
    "largest_weight": "tokens.weight_K / tokens.weight_K.max() * logprobs_K",
    "position": "tokens.weight_K * logprobs_K * torch.arange(len(logprobs_K))",
    "neighbour": "tokens.weight_K * logprobs_K + logprobs_K.roll(1)",
    "gradient_alone": "tokens.weight_K * logprobs_K + logprobs_K.sum() - logprobs_K.sum().detach()",
    "mean_ratio": "tokens.weight_K * logprobs_K * tokens.ratio(logprobs_K).mean().detach()",
    "deviation": "tokens.weight_K * logprobs_K / (tokens.advantages_K.std() + 1e-4)",
    "fails_alone": "tokens.weight_K * logprobs_K if len(logprobs_K) != 1 else {}['one']",
    "chance": "tokens.weight_K * logprobs_K * torch.rand(len(logprobs_K))",
}


def write_marked(
    folder: Path, name: str, body: str, mark: str = "@token_level", parameters: str = "logprobs_K, tokens"
) -> None:
    code = f"import torch\nfrom pipelinerl.finetune.rl import token_level\n\n{mark}\n"
    (folder / f"marked_{name}.py").write_text(f"{code}def marked({parameters}):\n    return {body}\n")


@pytest.mark.parametrize("proximal", [(), ("finetune.rl.proximal_every=2",)])
@pytest.mark.parametrize("case", SECRETLY_WHOLE)
def test_loss_marked_token_level_that_is_not_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, proximal: tuple[str, ...]
) -> None:
    """With a sequence correction, too: then the head takes all tokens at once, but the next run may drop it."""
    write_marked(tmp_path, case, SECRETLY_WHOLE[case])
    monkeypatch.syspath_prepend(str(tmp_path))
    for correction in ((), ("finetune.rl.veto=1e-4",)):
        cfg = config(f"finetune.rl.policy_loss=marked_{case}.marked", *proximal, *correction)
        with pytest.raises(ConfigError, match=r"policy_loss` is marked_.*marked @token_level, but.*remove the mark"):
            objective_check.check_objective(cfg)


@pytest.mark.parametrize("proximal", [(), ("finetune.rl.proximal_every=2",)])
@pytest.mark.parametrize(
    "body",
    [
        "-tokens.weight_K.clamp(max=3) * tokens.advantages_K * logprobs_K",
        "-tokens.mask_K * tokens.ratio(logprobs_K) * tokens.advantages_K * tokens.outer_weight_K",
        "torch.where(tokens.advantages_K > 0, -tokens.weight_K * logprobs_K.exp(), logprobs_K.square())",
    ],
)
def test_loss_marked_token_level_that_is_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, proximal: tuple[str, ...]
) -> None:
    name = f"honest_{abs(hash(body))}"
    write_marked(tmp_path, name, body)
    monkeypatch.syspath_prepend(str(tmp_path))
    for correction in ((), ("finetune.rl.sequence_mis=2",), ("finetune.rl.token_mis=2",)):
        objective_check.check_objective(config(f"finetune.rl.policy_loss=marked_{name}.marked", *proximal, *correction))


DEPENDS_ON_THE_PACK = ("mean", "normalised_advantages", "largest_weight", "neighbour", "mean_ratio", "deviation")


@pytest.mark.parametrize("case", DEPENDS_ON_THE_PACK)
def test_loss_without_a_mark_that_depends_on_other_sequences_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Its gradient would change with the packing and the number of ranks, and nothing would say so."""
    write_marked(tmp_path, f"{case}_whole", SECRETLY_WHOLE[case], mark="")
    monkeypatch.syspath_prepend(str(tmp_path))
    for correction in ((), ("finetune.rl.veto=1e-4",), ("finetune.rl.sequence_tis=2",)):
        cfg = config(f"finetune.rl.policy_loss=marked_{case}_whole.marked", *correction)
        with pytest.raises(ConfigError, match=r"depends on tokens of other sequences.*packed.*of token \d+ of 12"):
            objective_check.check_objective(cfg)


@pytest.mark.parametrize(
    "body",
    [
        "-tokens.weight_K * tokens.advantages_K * tokens.sequence_mean(logprobs_K)",
        "-tokens.mask_K * tokens.advantages_K * tokens.sequence_mean(tokens.ratio(logprobs_K))",
        "-tokens.weight_K * (tokens.advantages_K - tokens.sequence_mean(tokens.advantages_K) + 1) * logprobs_K",
    ],
)
def test_loss_without_a_mark_that_stays_in_its_sequence_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    name = f"within_{abs(hash(body))}"
    write_marked(tmp_path, name, body, mark="")
    monkeypatch.syspath_prepend(str(tmp_path))
    for correction in ((), ("finetune.rl.sequence_mis=2",), ("finetune.rl.veto=1e-4",)):
        objective_check.check_objective(config(f"finetune.rl.policy_loss=marked_{name}.marked", *correction))


@pytest.mark.parametrize("of_part", ["part >= part.quantile(0.8)", "part - part.min()"])
def test_loss_by_segments_is_tried_with_the_numbers_that_a_micro_batch_gives_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_part: str
) -> None:
    """They begin with 0, and each has a token. A sequence that was computed alone kept its number 1 or 2."""
    body = (
        "-tokens.weight_K * logprobs_K * torch.cat([torch.zeros(0), "
        f"*({of_part} for part in entropy.detach().split(torch.bincount(segments).tolist()) if len(segments))])"
    )
    name = f"segments_{abs(hash(of_part))}"
    write_marked(tmp_path, name, body, mark="", parameters="logprobs_K, tokens, segments, entropy")
    monkeypatch.syspath_prepend(str(tmp_path))
    objective_check.check_objective(config(f"finetune.rl.policy_loss=marked_{name}.marked"))
    imitated = ("sft.per_step=1", "sft.datasets=[a.json]")  # a conversation may lie between two sequences
    with pytest.raises(ConfigError, match=r"for one sequence it fails"):
        objective_check.check_objective(config(f"finetune.rl.policy_loss=marked_{name}.marked", *imitated))


def test_loss_that_is_no_number_for_a_large_ratio_is_refused_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_marked(tmp_path, "log", "-tokens.mask_K * (2.5 - tokens.ratio(logprobs_K)).log()", mark="")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"the loss of token 3 is nan where π/μ is .*3000"):
        objective_check.check_objective(config("finetune.rl.policy_loss=marked_log.marked"))


OFF_WHEN_SHARED = {
    "running_sum": (
        "-tokens.weight_K * torch.stack([(segments == s) * (logprobs_K * (segments == s)).cumsum(0) for s in "
        "range(3)]).sum(0)",
        r"the loss of token \d+ of 12",
    ),
    "own_sum": (
        "-tokens.weight_K * logprobs_K * torch.zeros(3).index_add(0, segments, tokens.advantages_K)[segments]",
        r"the loss of token \d+ of 12",
    ),
    "gradient": (
        "-tokens.weight_K * (logprobs_K + torch.zeros(3).index_add(0, segments, logprobs_K)[segments] "
        "- torch.zeros(3).index_add(0, segments, logprobs_K.detach())[segments])",
        r"the gradient of token \d+ of 12",
    ),
    "one_waits": (
        "-tokens.weight_K * (tokens.sequence_mean(logprobs_K) if (segments == 0).sum() not in (1, 2) else logprobs_K)",
        "the other waits",
    ),
    "one_without_tokens_waits": (
        "-tokens.weight_K * (tokens.sequence_mean(logprobs_K) if len(logprobs_K) else logprobs_K)",
        "the other waits",
    ),
    "fails": ("-tokens.weight_K * logprobs_K / (1 if (segments == 0).sum() not in (1, 2) else {}['x'])", "KeyError"),
}


@pytest.mark.parametrize("case", OFF_WHEN_SHARED)
def test_loss_that_needs_whole_sequences_is_refused_where_ranks_share_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """On one rank each of them is right."""
    body, message = OFF_WHEN_SHARED[case]
    write_marked(tmp_path, f"{case}_shared", body, mark="", parameters="logprobs_K, tokens, segments")
    monkeypatch.syspath_prepend(str(tmp_path))
    loss = f"marked_{case}_shared.marked"
    check_loss(loss)
    for correction in ({}, {"sequence_mis": 2.0}):  # which drops a sequence: the others are shared, too
        with pytest.raises(ConfigError, match=rf"seq_parallel.*{message}"):
            check_loss(loss, ranks=2, **correction)


def test_rank_may_take_the_reward_of_a_sequence_from_any_of_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "-tokens.weight_K * logprobs_K * torch.zeros(3).index_put((segments,), rewards)[segments]"
    write_marked(tmp_path, "reward", body, mark="", parameters="logprobs_K, tokens, segments, rewards")
    monkeypatch.syspath_prepend(str(tmp_path))
    check_loss("marked_reward.marked", ranks=2)


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_builtin_losses_and_means_over_a_sequence_may_be_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    check_loss(loss, ranks=2)
    write_marked(tmp_path, f"mean_{loss}", "-tokens.weight_K * tokens.sequence_mean(logprobs_K) * logprobs_K", mark="")
    monkeypatch.syspath_prepend(str(tmp_path))
    for correction in ({}, {"sequence_mis": 2.0}, {"veto": 1e-4}):
        check_loss(f"marked_mean_{loss}.marked", ranks=2, **correction)


@pytest.mark.parametrize("loss", ["reinforce", "ppo", "decoupled_ppo", "gspo"])
def test_builtin_losses_keep_their_mark(loss: str) -> None:
    compare_with_one_at_a_time(LossSettings(policy_loss=loss))


def test_every_builtin_loss_declares_the_keys_that_it_takes() -> None:
    fields = {field.name for field in dataclasses.fields(LossSettings)}
    assert set(CORRECTIONS) == set(Corrections.__dataclass_fields__)
    for name in POLICY_LOSSES:
        parameters = inspect.signature(find_loss(name)).parameters.values()
        assert loss_signature(name).given == tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        assert set(loss_signature(name).given) <= fields
    assert all(callable(find_advantage(name)) for name in ADVANTAGES)


def planted_loss(monkeypatch: pytest.MonkeyPatch, folder: Path, **traits: bool) -> None:
    """A further built-in loss, which holds no ratio and reads no weight."""
    code = "def sign_pg(logprobs_K, tokens):\n    return -tokens.mask_K * tokens.advantages_K.sign() * logprobs_K\n"
    (folder / "sign_pg.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))
    entry = BuiltInLoss("sign_pg.sign_pg", "never", ("1", "1"), **traits)
    monkeypatch.setitem(POLICY_LOSSES, "sign_pg", entry)  # type: ignore[misc]


TRUNCATED = ("finetune.rl.policy_loss=sign_pg", "finetune.rl.token_tis=2")


def test_rules_refuse_a_truncation_of_a_loss_that_declares_no_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted_loss(monkeypatch, tmp_path)
    text = ratio_is_counted_once(config(*TRUNCATED))
    assert text == "`finetune.rl.token_tis`=2.0 has no effect: sign_pg has no weight π/μ that it could bound; remove it"
    assert ratio_is_counted_once(config(TRUNCATED[0], "finetune.rl.token_mis=2")) is None


def test_builtin_loss_is_tried_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It declares a weight that it does not read: the trial finds that, not the first step."""
    planted_loss(monkeypatch, tmp_path, reads_weight=True)
    cfg = config(*TRUNCATED)
    assert ratio_is_counted_once(cfg) is None
    assert not objective_is_default(cfg)
    with pytest.raises(ConfigError, match=r"token_tis`=2\.0 bounds .* sign_pg does not read.*remove it"):
        objective_check.check_objective(cfg)
    objective_check.check_objective(config(TRUNCATED[0], "finetune.rl.token_mis=2"))


def test_default_objective_passes_the_trial_that_a_start_leaves_out() -> None:
    assert objective_is_default(config())
    objective_check.check_objective(config())


@pytest.mark.parametrize("proximal", [(), ("finetune.rl.proximal_every=2",)])
@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_trial_refuses_a_builtin_loss_where_the_rules_do(loss: str, proximal: tuple[str, ...]) -> None:
    lower = {"veto": ["veto=0.1"], "token_mis_low": ["token_mis_low=0.5", "token_mis=2"]}
    for settings in ([], *(lower.get(name, [f"{name}=2"]) for name in CORRECTIONS)):
        cfg = config(f"finetune.rl.policy_loss={loss}", *proximal, *(f"finetune.rl.{one}" for one in settings))
        if ratio_is_counted_once(cfg) is None:
            objective_check.check_objective(cfg)
        else:
            with pytest.raises(ConfigError, match=r"token_tis|sequence_tis"):
                objective_check.check_objective(cfg)


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
