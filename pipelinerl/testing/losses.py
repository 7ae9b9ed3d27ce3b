"""Tries a policy loss on made-up tokens, in your tests as at the start of a run.

    from pipelinerl.testing.losses import check_loss

    def test_my_loss() -> None:
        check_loss("my_loss.one_sided", ranks=2, epsilon_high=0.3)

`pipelinerl.testing` itself does not import torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pipelinerl.errors import ConfigError
from pipelinerl.finetune.rl.interface import is_token_level
from pipelinerl.finetune.rl.objective import LossSettings, find_loss, policy_term
from pipelinerl.finetune.rl.tokens import SequenceGroup, TokenInputs

NOT_TOKEN_LEVEL = (
    "it is marked @token_level, but the loss of a token depends on other tokens (or on chance), so that it would "
    "change with finetune.head_chunk_tokens; remove the mark, or the dependence:"
)

NOT_BY_SEQUENCE = (
    "the loss of a token depends on tokens of other sequences (or on chance), so that it would change with how a batch "
    "is packed and with the number of ranks; take means over its sequence (tokens.sequence_mean), or a fixed number:"
)
NOT_BY_RANK = (
    "the loss of a token depends on where its rank has the other tokens, and with finetune.seq_parallel > 1 a rank has "
    "a part of each sequence; take sums over a sequence from tokens.sequence_mean, called equally often on every rank, "
    "or set finetune.seq_parallel to 1:"
)

SEQUENCES = (5, 4, 3)
"""Lengths of the sequences whose loss is computed at once, one at a time, and on two ranks that share them."""
RATIOS = (0.5, 1.7, 1.02, 3000.0, 0.97, 0.004, 1.3, 0.88, 12.0, 1.0, 0.6, 1.11)
"""π/μ of the 12 tokens: on both sides of usual bounds, some far outside, in any order."""
SHARES = ("000111111000", "001100110010", "000000000000")
"""Which of two ranks has each token: all sequences are cut as one document, or each by itself, or one rank has none."""


def check_loss(policy_loss: str, *, ranks: int = 1, **settings: Any) -> None:
    """Tries a loss.

    Args:
        policy_loss: as `finetune.rl.policy_loss`.
        ranks: 2 also tries it on two ranks that share every sequence, as with `finetune.seq_parallel` > 1.
        settings: further keys of `finetune.rl`, such as `policy_loss_kwargs` or `veto`.

    Raises:
        ConfigError: the loss has wrong shapes, no gradient or values that are not finite, or the loss of a token
            depends on other sequences, on other tokens (``@token_level``), or on the rank.
    """
    try_loss(chosen := LossSettings(policy_loss=policy_loss, **settings))
    if ranks > 1:
        compare_with_ranks(chosen)


def try_loss(settings: LossSettings, *, has_gaps: bool = False) -> None:
    """Tries a loss on two sequences with ratios from ½ to 2 and advantages of both signs, and on no tokens.

    Args:
        has_gaps: as in ``compare_with_one_at_a_time``, which is called between both.
    """
    ratios = torch.tensor([0.5, 0.9, 1.0, 1.1, 2.0], requires_grad=True)
    for count in (5, 0):
        logprobs_K = (ratios.log() - 1.0)[:count]
        scored_K = torch.linspace(-2.0, -0.5, 5)[:count]
        values_K = torch.linspace(-0.5, 0.5, 5)[:count].requires_grad_()
        inputs = TokenInputs(
            sampler_logprobs_K=torch.full((count,), -1.0),
            advantages_K=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0])[:count],
            weights_K=torch.ones(count),
            segments_K=torch.tensor([0, 0, 0, 1, 1])[:count],
            num_segments=2,
            rewards_K=torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])[:count],
            values_K=values_K,
            bootstrap_S=torch.tensor([0.0, 0.25]),
            lag_K=torch.arange(5)[:count],
            ref_logprobs_K=scored_K,
            teacher_logprobs_K=scored_K,
        )
        loss, _ = policy_term(logprobs_K, inputs, settings, torch.linspace(0.1, 1.0, 5)[:count])
        for name, found_K in (("losses_K", loss.losses_K), ("clipped_K", loss.clipped_K)):
            if found_K is not None and found_K.shape != (count,):
                raise ConfigError(f"{name} has shape {tuple(found_K.shape)} for {count} tokens: return one per token")
        if not torch.isfinite(loss.losses_K).all():
            raise ConfigError(f"the losses of ratios {ratios.tolist()} are {loss.losses_K.tolist()}")
        if count and not loss.losses_K.requires_grad:
            raise ConfigError("the losses have no gradient: compute them from logprobs_K, which is not a constant")
        if count:  # before a loss is called without tokens, which one that depends on all of them may not take
            compare_with_one_at_a_time(settings, has_gaps=has_gaps)


def compare_with_one_at_a_time(settings: LossSettings, *, has_gaps: bool = False) -> None:
    """Computes a loss for the 12 tokens of three sequences at once, then for each sequence alone.

    A loss marked ``token_level`` is computed for each token alone, without corrections by sequence, with which the
    output head takes all tokens at once. Losses, clipped tokens and gradients must agree: the loss of a token may not
    depend on the rest of its micro-batch, nor on the chunks of the output head.

    Args:
        has_gaps: a micro-batch also has imitated sequences, whose tokens a loss does not get.

    Raises:
        ConfigError: they do not agree, or are not numbers.
    """
    lengths: tuple[int, ...] = SEQUENCES
    unit, mistake = "sequence", NOT_BY_SEQUENCE
    if is_token_level(find_loss(settings.policy_loss)):
        lengths, unit, mistake = (1,) * sum(SEQUENCES), "token", NOT_TOKEN_LEVEL
        settings = replace(settings, sequence_tis=None, sequence_mis=None, veto=None)
    logprobs_K, inputs = _three_sequences(settings)
    together = _loss_columns(logprobs_K, inputs, settings)
    for name, all_K in together.items():
        if all_K.isnan().any():
            raise ConfigError(f"the {name} of token {int(all_K.isnan().byte().argmax())} is nan where π/μ is {RATIOS}")
    rows = torch.arange(sum(SEQUENCES)).split(lengths)
    parts = [inputs[row] if has_gaps else _only_sequence(inputs[row]) for row in rows]
    alone = _columns_of_parts([logprobs_K[row] for row in rows], parts, settings, f"{mistake} for one {unit}")
    _refuse_difference(together, _concatenated(alone), mistake, f"its {unit} is computed alone")


def compare_with_ranks(settings: LossSettings) -> None:
    """Computes a loss for the tokens of three sequences at once, then on two ranks that share them.

    Losses, clipped tokens and gradients must agree, also where one of the ranks has no trained token.

    Raises:
        ConfigError: they do not agree, or one rank takes more sums over sequences than the other.
    """
    logprobs_K, inputs = _three_sequences(settings)
    together = _loss_columns(logprobs_K, inputs, settings)
    for share in SHARES:
        shared = _on_two_ranks(logprobs_K, inputs, settings, share)
        _refuse_difference(together, shared, NOT_BY_RANK, "two ranks share the sequences")


def _on_two_ranks(logprobs_K: Tensor, inputs: TokenInputs, settings: LossSettings, share: str) -> Mapping[str, Tensor]:
    """Returns the columns of two ranks that share the tokens as in ``share``, in the order of the tokens.

    The ranks take turns in one process. To each sum, a rank adds the other rank's part from the previous pass, so n
    sums are right after n + 1 passes.
    """
    rows = [torch.tensor([k for k, rank in enumerate(share) if rank == mine], dtype=torch.int64) for mine in "01"]
    columns, brought, passes = list[dict[str, Tensor]](), [list[Tensor]() for _ in range(2)], 0
    while passes <= max(map(len, brought)):
        ranks = [_TurnTaking(None, index, 2, others=brought[1 - index]) for index in range(2)]
        parts = [replace(inputs[row], group=rank) for rank, row in zip(ranks, rows, strict=True)]
        columns = _columns_of_parts([logprobs_K[row] for row in rows], parts, settings, f"{NOT_BY_RANK} on a rank")
        brought = [rank.brought for rank in ranks]
        passes += 1
    if len(brought[0]) != len(brought[1]):
        counts = " and the other waits for ".join(str(len(each)) for each in brought)
        raise ConfigError(f"{NOT_BY_RANK} of two ranks, one takes {counts} sums")
    order = torch.cat(rows).argsort()
    return {name: found[order] for name, found in _concatenated(columns).items()}


@dataclass(frozen=True)
class _TurnTaking(SequenceGroup):
    """One of two ranks that take turns."""

    others: Sequence[Tensor] = ()
    """The other rank's part of each sum in the previous pass."""
    brought: list[Tensor] = field(default_factory=list)
    """This rank's part of each sum in this pass."""

    def sum_(self, values: Tensor) -> None:
        self.brought.append(values.clone())
        if len(self.brought) <= len(self.others):
            values += self.others[len(self.brought) - 1]


def _three_sequences(settings: LossSettings) -> tuple[Tensor, TokenInputs]:
    """Returns log π_θ [12] and the other inputs of the tokens of three sequences."""
    ratios_K = torch.tensor(RATIOS)
    logprobs_K = -torch.linspace(0.1, 3.0, 12).square()
    return logprobs_K, TokenInputs(
        sampler_logprobs_K=logprobs_K - ratios_K.log(),
        advantages_K=torch.tensor([1.3, -0.7, 0.4]).repeat_interleave(torch.tensor(SEQUENCES)),
        weights_K=torch.linspace(0.2, 0.9, 12),
        segments_K=torch.arange(len(SEQUENCES)).repeat_interleave(torch.tensor(SEQUENCES)),
        num_segments=len(SEQUENCES),
        proximal_logprobs_K=logprobs_K - ratios_K.flip(0).log() if settings.has_proximal else None,
        rewards_K=torch.tensor([1.0, -1.0, 0.25]).repeat_interleave(torch.tensor(SEQUENCES)),
        values_K=torch.linspace(0.5, -0.5, 12),
        lag_K=torch.arange(12) % 4,
        ref_logprobs_K=logprobs_K.flip(0),
        teacher_logprobs_K=logprobs_K.flip(0),
    )


def _only_sequence(inputs: TokenInputs) -> TokenInputs:
    """Returns the inputs of one sequence as in a micro-batch that holds nothing else."""
    return replace(inputs, segments_K=torch.zeros_like(inputs.segments_K), num_segments=1)


def _columns_of_parts(
    logprobs: Sequence[Tensor], parts: Sequence[TokenInputs], settings: LossSettings, where: str
) -> list[dict[str, Tensor]]:
    """Returns ``_loss_columns`` of each part. If one raises, raises ``ConfigError``, which says ``where``."""
    try:
        return [_loss_columns(logprobs_K, part, settings) for logprobs_K, part in zip(logprobs, parts, strict=True)]
    except Exception as error:  # the user's function
        raise ConfigError(f"{where} it fails with {type(error).__name__}: {error}") from error


def _concatenated(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _refuse_difference(together: Mapping[str, Tensor], apart: Mapping[str, Tensor], mistake: str, when: str) -> None:
    for name, all_K in together.items():
        different_K = ~torch.isclose(all_K, apart[name], rtol=1e-4, atol=1e-6)
        if different_K.any():
            worst = int(different_K.float().argmax())
            raise ConfigError(
                f"{mistake} the {name} of token {worst} of {len(all_K)} is {all_K[worst]:.6g} when all are computed at "
                f"once, and {apart[name][worst]:.6g} when {when}"
            )


def _loss_columns(logprobs_K: Tensor, inputs: TokenInputs, settings: LossSettings) -> dict[str, Tensor]:
    """Returns float [K] columns: losses, gradients of their weighted sum, and clipped tokens, if the loss has them."""
    logprobs_K = logprobs_K.detach().requires_grad_()
    loss, _ = policy_term(logprobs_K, inputs, settings, -0.5 * logprobs_K.detach())
    gradients_K = torch.zeros_like(logprobs_K)
    if loss.losses_K.requires_grad:  # a loss may return a constant for no tokens
        (gradients_K,) = torch.autograd.grad((inputs.weights_K * loss.losses_K).sum(), logprobs_K)
    columns = {"loss": loss.losses_K.detach(), "gradient": gradients_K}
    return columns if loss.clipped_K is None else columns | {"clip (1 = acts)": loss.clipped_K.float()}
