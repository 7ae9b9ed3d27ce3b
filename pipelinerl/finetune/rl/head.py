"""The output head: computes log-probabilities, entropy and their gradient for one chunk of tokens at a time.

The forward pass computes the gradient of a chunk's logits too, from the same softmax. Only a ``sequence_level``
objective whose tokens do not fit one chunk needs a first pass for the log-probabilities. Logits are float32 (float64
for float64 inputs), from operands in the model's dtype (docs/algorithms.md §7).

Shapes: K trained tokens, C tokens of a chunk, J tokens of a support, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn


class Objective(Protocol):
    """The loss as the head calls it."""

    @property
    def sequence_level(self) -> bool:
        """Whether a token's loss depends on other tokens. If so, it is only called for all K tokens at once."""
        ...

    @property
    def all_at_once(self) -> bool:
        """Whether it must be called exactly once, even for no tokens, because other ranks take part."""
        ...

    @property
    def uses_entropy(self) -> bool:
        """Whether the loss depends on the entropy. If False, the head ignores the gradient of the entropy."""
        ...

    def __call__(
        self,
        logprobs_C: Tensor,
        entropy_C: Tensor,
        start: int,
        values_C: Tensor | None = None,
        support_CJ: Tensor | None = None,
    ) -> Tensor:
        """Scalar loss of the C tokens from ``start`` on, differentiable in all tensors.

        ``values_C``: of the value head. ``support_CJ``: log-probabilities of the support. None: the loss needs none.
        """
        ...


class HeadOutput(NamedTuple):
    loss: Tensor
    """Scalar, differentiable with respect to hidden states and head weight."""
    logprobs_K: Tensor
    entropy_K: Tensor


@dataclass(frozen=True)
class LogitMap:
    """How a model changes the product z of states and head weight: z ← cap · tanh(scale · z / cap)."""

    scale: float = 1.0
    softcap: float | None = None
    """The cap. None: no cap, z ← scale · z."""

    def apply_(self, logits: Tensor) -> Tensor:
        """Apply the map to ``logits`` in place."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def slope(self, logits: Tensor) -> Tensor | None:
        """1 − tanh² u, where the mapped ``logits`` are cap · tanh u: the cap's derivative. None without a cap."""
        return None if self.softcap is None else (logits / self.softcap).square_().neg_().add_(1.0)


@dataclass(frozen=True)
class _HeadOptions:
    objective: Objective | None
    """None: compute only log-probabilities and entropy, without a graph."""
    temperature: float
    chunk: int
    fp32: bool
    logit_map: LogitMap
    narrow: torch.dtype | None
    """Half-precision dtype to which states and weight are rounded. None: they are multiplied as they are."""
    on_chunk: Callable[[], object]
    """Called for every chunk."""
    loss_scale: float = 1.0
    """Factor of the loss after the head, which the gradients have before they are rounded."""
    support_KJ: Tensor | None = None
    """int64: tokens whose log-probabilities in each place the objective needs, beside the target's. None: no other."""


def _ignore() -> None:
    pass


class OutputHead(nn.Linear):
    """Replacement for a causal LM's ``lm_head`` that computes plain products, or the loss without all logits."""

    logit_map = LogitMap()
    on_chunk: Callable[[], object] = staticmethod(_ignore)
    """Called for every chunk of tokens that the head computes."""

    @classmethod
    def wrap(cls, linear: nn.Linear, logit_map: LogitMap | None = None) -> "OutputHead":
        """Make a head with the same Parameter objects as ``linear``, so that a tied head stays tied.

        ``logit_map``: how the model changes the head's products. The loss applies the same map.
        """
        head = cls(1, 1, bias=False, device="meta")
        head.logit_map = logit_map or LogitMap()
        head.in_features, head.out_features = linear.in_features, linear.out_features
        head.weight, head.bias = linear.weight, linear.bias
        return head

    def report_chunks(self, report: Callable[[], object]) -> None:
        """Call ``report`` for every chunk from now on."""
        self.on_chunk = report

    def forward(self, input: Tensor, *loss_arguments: Any) -> Any:
        """``forward(hidden)`` returns products, ``forward(hidden_KH, targets_K, options)`` returns a ``HeadOutput``."""
        if not loss_arguments:
            return super().forward(input)
        targets_K, options, *values = loss_arguments
        if options.objective is None:
            return self._evaluate_only(input, targets_K, options)
        return HeadOutput(*_ChunkedLoss.apply(input, self.weight, self.bias, *(values or [None]), targets_K, options))

    @torch.no_grad()
    def _evaluate_only(self, hidden_KH: Tensor, targets_K: Tensor, options: _HeadOptions) -> HeadOutput:
        with torch.autocast(hidden_KH.device.type, enabled=False):
            operands = _Operands(hidden_KH, self.weight, self.bias, options)
            logprobs_K, entropy_K, _ = _logprobs(operands, targets_K, options.temperature, options.chunk)
        return HeadOutput(logprobs_K.new_zeros(()), logprobs_K, entropy_K)


def head_loss(
    head: OutputHead,
    hidden_KH: Tensor,
    targets_K: Tensor,
    objective: Objective,
    *,
    temperature: float,
    chunk: int,
    fp32: bool,
    loss_scale: float = 1.0,
    values_K: Tensor | None = None,
    support_KJ: Tensor | None = None,
) -> HeadOutput:
    """Loss, log-probabilities and entropy of ``targets_K``.

    Args:
        hidden_KH: the states that predict the targets.
        targets_K: int64, token ids.
        objective: the loss.
        temperature: divides the logits.
        chunk: tokens whose logits are computed at a time.
        fp32: whether the products of a bfloat16 head keep float32 precision.
        loss_scale: factor by which the caller multiplies the loss before the backward pass.
        values_K: of the value head, differentiable. None: the objective depends on none.
        support_KJ: int64, further token ids whose log-probabilities the objective gets. None: it needs none.
    """
    narrow, on_chunk = _narrow_dtype(head.weight), head.on_chunk
    options = _HeadOptions(
        objective, temperature, chunk, fp32, head.logit_map, narrow, on_chunk, loss_scale, support_KJ
    )
    return head(hidden_KH, targets_K, options, values_K)


def head_logprobs(
    head: OutputHead, hidden_KH: Tensor, targets_K: Tensor, *, temperature: float, chunk: int, fp32: bool
) -> tuple[Tensor, Tensor]:
    """(log-probabilities [K], entropies [K]) without a graph. Arguments as in ``head_loss``."""
    options = _HeadOptions(None, temperature, chunk, fp32, head.logit_map, _narrow_dtype(head.weight), head.on_chunk)
    return head(hidden_KH, targets_K, options)[1:]


def _narrow_dtype(weight_VH: Tensor) -> torch.dtype | None:
    """The half-precision dtype of the weight, or of autocast where that is on."""
    if weight_VH.dtype in (torch.bfloat16, torch.float16):
        return weight_VH.dtype
    device = weight_VH.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class _Operands:
    """Hidden states and weight as they are multiplied. With ``fp32``, a half-precision product gives float32."""

    def __init__(self, hidden_KH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, options: _HeadOptions):
        fp32, narrow = options.fp32, options.narrow
        self.dtype = _compute_dtype(hidden_KH)
        self.direct = narrow is not None and weight_VH.is_cuda
        self.fp32 = fp32
        self.logit_map, self._on_chunk = options.logit_map, options.on_chunk
        if narrow is not None:
            hidden_KH, weight_VH = hidden_KH.to(narrow), weight_VH.to(narrow)
        # Only CUDA sums half-precision products in float32. Widened operands give the same.
        if not self.direct and (fp32 or narrow is None):
            target = torch.promote_types(weight_VH.dtype, self.dtype)
            hidden_KH, weight_VH = hidden_KH.to(target), weight_VH.to(target)
        self.hidden_KH, self.weight_VH, self.bias_V = hidden_KH, weight_VH, bias_V

    def logits(self, rows: slice) -> Tensor:
        self._on_chunk()
        hidden_CH = self.hidden_KH[rows]
        if self.direct and self.fp32:
            logits_CV = torch.mm(hidden_CH, self.weight_VH.t(), out_dtype=torch.float32)
        else:
            logits_CV = torch.mm(hidden_CH, self.weight_VH.t()).to(self.dtype)
        return self.logit_map.apply_(logits_CV if self.bias_V is None else logits_CV.add_(self.bias_V))


class _Chunk(NamedTuple):
    targets_C1: Tensor
    support_CJ: Tensor | None
    exp_CV: Tensor
    """exp(s), where s are the logits minus their row maximum."""
    product_CV: Tensor
    """s · exp(s)"""
    slope_CV: Tensor | None
    """Derivative of the logits by the capped products, without their scale. None: no cap, or not asked for."""
    sum_C: Tensor
    logprobs_C: Tensor
    support_logprobs_CJ: Tensor | None
    entropy_C: Tensor


def _rows(total: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, total)) for start in range(0, total, chunk))


def _evaluate(
    operands: _Operands,
    targets_K: Tensor,
    rows: slice,
    temperature: float,
    support_KJ: Tensor | None = None,
    *,
    with_slope: bool = False,
) -> _Chunk:
    """Compute the softmax of one chunk: its two full-vocabulary buffers and the values derived from them.

    ``with_slope``: whether the gradient of the logits will be asked for, which with a cap needs a third buffer.
    """
    targets_C1 = targets_K[rows, None]
    logits_CV = operands.logits(rows)
    slope_CV = operands.logit_map.slope(logits_CV) if with_slope else None
    if temperature != 1.0:
        logits_CV.div_(temperature)
    shifted_CV = logits_CV.sub_(logits_CV.amax(1, keepdim=True))
    chosen_C = shifted_CV.gather(1, targets_C1)[:, 0]
    support_CJ = None if support_KJ is None else support_KJ[rows]
    supported_CJ = None if support_CJ is None else shifted_CV.gather(1, support_CJ)
    exp_CV = shifted_CV.exp()
    sum_C = exp_CV.sum(1)
    log_sum_C = sum_C.log()
    product_CV = shifted_CV.mul_(exp_CV)
    entropy_C = log_sum_C - product_CV.sum(1) / sum_C
    if supported_CJ is not None:
        supported_CJ = supported_CJ - log_sum_C[:, None]
    return _Chunk(
        targets_C1, support_CJ, exp_CV, product_CV, slope_CV, sum_C, chosen_C - log_sum_C, supported_CJ, entropy_C
    )


def _logprobs(
    operands: _Operands, targets_K: Tensor, temperature: float, chunk: int, support_KJ: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute only log-probabilities, entropies and the support's log-probabilities."""
    logprobs_K = torch.zeros(targets_K.shape[0], dtype=operands.dtype, device=targets_K.device)
    entropy_K = torch.zeros_like(logprobs_K)
    supported_KJ = None if support_KJ is None else torch.zeros_like(support_KJ, dtype=operands.dtype)
    for rows in _rows(targets_K.shape[0], chunk):
        *buffers, logprobs_C, supported_CJ, entropy_C = _evaluate(operands, targets_K, rows, temperature, support_KJ)
        del buffers  # of the size of the vocabulary
        logprobs_K[rows], entropy_K[rows] = logprobs_C, entropy_C
        if supported_KJ is not None and supported_CJ is not None:
            supported_KJ[rows] = supported_CJ
    return logprobs_K, entropy_K, supported_KJ


def _logits_gradient(part: _Chunk, g_C: Tensor, e_C: Tensor | None, s_CJ: Tensor | None, factor: float) -> Tensor:
    """Gradient of the head's products from those of log-probability (g), entropy (e) and support (s).

    Reuses the chunk's buffers.

    d log p_y / d z_j = δ_jy − p_j and d H / d z_j = −p_j (log p_j + H), with p_j = exp(s_j) / Σ exp(s) and
    log p_j = s_j − log Σ exp(s).

    Args:
        factor: derivative of the logits at the temperature by the products, where no cap acts.
    """
    g_C = g_C * factor
    total_C = g_C if s_CJ is None else g_C + factor * s_CJ.sum(1)
    if e_C is None:
        gradient_CV = part.exp_CV.mul_((-total_C / part.sum_C)[:, None])
    else:
        e_C = e_C * factor
        offset_C = e_C * (part.entropy_C - part.sum_C.log()) + total_C
        gradient_CV = part.exp_CV.mul_((-offset_C / part.sum_C)[:, None])
        gradient_CV.add_(part.product_CV.mul_((-e_C / part.sum_C)[:, None]))
    gradient_CV.scatter_add_(1, part.targets_C1, g_C[:, None])
    if part.support_CJ is not None and s_CJ is not None:
        gradient_CV.scatter_add_(1, part.support_CJ, factor * s_CJ)
    return gradient_CV if part.slope_CV is None else gradient_CV.mul_(part.slope_CV)


class _Derivatives(NamedTuple):
    """Derivatives of the loss by the arguments of one call of the objective. None: it did not get the argument."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None
    support: Tensor | None

    def of(self, rows: slice) -> "_Derivatives":
        """The same for some of the tokens."""
        values, support = (None if one is None else one[rows] for one in (self.values, self.support))
        return _Derivatives(self.logprobs[rows], self.entropy[rows], values, support)


def _differentiate(
    objective: Objective, logprobs: Tensor, entropy: Tensor, start: int, values: Tensor | None, support: Tensor | None
) -> tuple[Tensor, _Derivatives]:
    """The loss of one call of the objective, and its derivatives."""
    with torch.enable_grad():
        logprobs, entropy = logprobs.detach().requires_grad_(), entropy.detach().requires_grad_()
        optional = {"values_C": values, "support_CJ": support}
        given = {name: one.detach().requires_grad_() for name, one in optional.items() if one is not None}
        loss = objective(logprobs, entropy, start, **given)
        inputs = (logprobs, entropy, *given.values())
        g, e, *others = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
    by_name = dict(zip(given, others, strict=True))
    return loss.detach(), _Derivatives(g, e, by_name.get("values_C"), by_name.get("support_CJ"))


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_KH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        values_K: Tensor | None,
        targets_K: Tensor,
        options: _HeadOptions,
    ):
        with torch.autocast(hidden_KH.device.type, enabled=False):
            return _forward(ctx, hidden_KH, weight_VH, bias_V, values_K, targets_K, options)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor):
        gradients, ctx.gradients = ctx.gradients, None
        rest = grad_loss / ctx.loss_scale
        return (*(None if g is None else g.mul_(rest.to(g.dtype)) for g in gradients), None, None)


class _Gradients:
    """Accumulates the gradients of the head's inputs. Those that autograd does not need are None."""

    def __init__(self, operands: _Operands, hidden_KH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, needed: Any):
        self._operands = operands
        self.hidden = torch.zeros_like(hidden_KH) if needed[0] else None
        self.weight = torch.zeros_like(weight_VH, dtype=operands.dtype) if needed[1] else None
        self.bias = torch.zeros_like(bias_V) if bias_V is not None and needed[2] else None
        self._weight_dtype = weight_VH.dtype

    def add(self, gradient_CV: Tensor, rows: slice) -> None:
        """Add the contribution of ``rows``. ``gradient_CV``: gradient of their logits, in the dtype of the products."""
        if self.bias is not None:
            self.bias += gradient_CV.sum(0, dtype=self._operands.dtype)
        if self.hidden is not None:
            self.hidden[rows] = torch.mm(gradient_CV, self._operands.weight_VH).to(self.hidden.dtype)
        if self.weight is not None:
            _accumulate(self.weight, gradient_CV, self._operands.hidden_KH[rows])

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.hidden, None if self.weight is None else self.weight.to(self._weight_dtype), self.bias


def _forward(
    ctx: Any,
    hidden_KH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    values_K: Tensor | None,
    targets_K: Tensor,
    options: _HeadOptions,
):
    operands = _Operands(hidden_KH, weight_VH, bias_V, options)
    gradients = _Gradients(operands, hidden_KH, weight_VH, bias_V, ctx.needs_input_grad)
    total, objective, temperature = targets_K.shape[0], options.objective, options.temperature
    support_KJ = options.support_KJ
    assert objective is not None
    ahead, values_grad = None, None
    if objective.all_at_once or (objective.sequence_level and total > options.chunk):
        logprobs_K, entropy_K, supported_KJ = _logprobs(operands, targets_K, temperature, options.chunk, support_KJ)
        loss, ahead = _differentiate(objective, logprobs_K, entropy_K, 0, values_K, supported_KJ)
        values_grad = ahead.values
    else:
        logprobs_K = torch.zeros(total, dtype=operands.dtype, device=hidden_KH.device)
        entropy_K = torch.zeros_like(logprobs_K)
        loss = logprobs_K.new_zeros(())
        values_grad = None if values_K is None else torch.zeros_like(values_K)

    def one_chunk(rows: slice) -> tuple[Tensor, Tensor]:
        """Loss (0 if known ahead) and gradient of the logits. Returning frees the other full-vocabulary buffers."""
        part = _evaluate(operands, targets_K, rows, temperature, support_KJ, with_slope=True)
        if ahead is None:
            logprobs_K[rows], entropy_K[rows] = part.logprobs_C, part.entropy_C
            values_C = None if values_K is None else values_K[rows]
            part_loss, by = _differentiate(
                objective, part.logprobs_C, part.entropy_C, rows.start, values_C, part.support_logprobs_CJ
            )
            if values_grad is not None and by.values is not None:
                values_grad[rows] = by.values
        else:
            part_loss, by = loss.new_zeros(()), ahead.of(rows)
        used_C = by.entropy if objective.uses_entropy else None
        factor = options.loss_scale * options.logit_map.scale / temperature
        gradient_CV = _logits_gradient(part, by.logprobs, used_C, by.support, factor)
        return part_loss, gradient_CV.to(operands.weight_VH.dtype)

    for rows in _rows(total, options.chunk):
        part_loss, gradient_CV = one_chunk(rows)
        gradients.add(gradient_CV, rows)
        loss = loss + part_loss
        del gradient_CV
    values_grad = None if values_grad is None else values_grad * options.loss_scale
    ctx.gradients, ctx.loss_scale = (*gradients.finish(), values_grad), options.loss_scale
    ctx.mark_non_differentiable(logprobs_K, entropy_K)
    return loss, logprobs_K, entropy_K


def _accumulate(total_VH: Tensor, gradient_CV: Tensor, hidden_CH: Tensor) -> None:
    """total += gradientᵀ · hidden, accumulated in the total's dtype."""
    if gradient_CV.dtype == total_VH.dtype:
        total_VH.addmm_(gradient_CV.t(), hidden_CH)
    elif gradient_CV.is_cuda and total_VH.dtype == torch.float32:
        torch.addmm(total_VH, gradient_CV.t(), hidden_CH, out_dtype=torch.float32, out=total_VH)
    else:
        total_VH.add_(torch.mm(gradient_CV.t(), hidden_CH))
