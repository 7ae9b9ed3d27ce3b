"""The interface of a distributed engine: what the trainer needs, and nothing else.

An engine owns the policy, its optimizer and the process group. Gradients of an optimizer batch are SUMMED over
micro-batches and ranks, because the weights in the micro-batches already contain the aggregation. Ranks synchronise
exactly once per step. An engine exchanges its training state as this rank's pieces of flattened float32 tensors by
name, however it shards them inside. A checkpoint of one engine and rank count therefore resumes on any other.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipelinerl.config.engine import EngineTraits
from pipelinerl.config.sections import Config, FinetuneSection
from pipelinerl.errors import RecordError
from pipelinerl.finetune.data import Batch
from pipelinerl.finetune.model import Policy, PolicyOutput, Tokens
from pipelinerl.finetune.pieces import Piece
from pipelinerl.finetune.rendezvous import gather_objects, leave_ranks
from pipelinerl.finetune.rl.objective import LossSettings

OPTIMIZER_STATES = ("exp_avg", "exp_avg_sq")


class NonFiniteGradientError(RecordError):
    """The gradient of an optimizer batch is NaN or infinite. The weights are unchanged."""


class Engine(ABC):
    """Trains one policy on this rank.

    Args:
        policy: on the meta device where the model's file is read shard by shard, else with its values.
        cfg: the run's configuration.
        device: of this rank.
    """

    traits: ClassVar[EngineTraits] = EngineTraits()
    """What launcher, plan and checks need to know about the engine before it is built."""
    policy: Policy
    rank: int
    world_size: int
    """Ranks whose gradients it sums. An engine that does not take it from torch.distributed declares `max_ranks`."""
    device: torch.device
    scaling: Tensor | None = None
    """float32 [3] on the host, in checkpoints: loss scale, steps since it changed, skipped steps. None: no scale."""

    @abstractmethod
    def __init__(self, policy: Policy, cfg: Config, device: torch.device): ...

    @abstractmethod
    def forward(self, batch: Batch, settings: LossSettings) -> PolicyOutput:
        """Compute the loss of one micro-batch."""

    @torch.no_grad()
    def evaluate(self, tokens: Tokens | Batch) -> Tensor:
        """Hidden states or log-probabilities (``Policy.forward``), without dropout and without a graph. Collective."""
        self.policy.eval()
        try:
            with self.precision():
                return self.policy(tokens)
        finally:
            self.policy.train()

    def precision(self) -> AbstractContextManager:
        """Context manager that sets the precision of a forward pass."""
        return contextlib.nullcontext()

    @abstractmethod
    def backward(self, loss: Tensor, last: bool) -> None:
        """Accumulate gradients. ``last`` marks the last micro-batch of the step, in which ranks synchronise."""

    @abstractmethod
    def step(self, learning_rate: float) -> float:
        """Clip the gradients, update the weights, clear the gradients. Returns the gradient norm before clipping.

        A norm that is not finite: the loss scale was too large and is smaller now, the weights are unchanged.

        Raises:
            NonFiniteGradientError: no loss scale is the reason. The weights are unchanged.
        """

    @abstractmethod
    def named_full_parameters(
        self, dtype: torch.dtype | None = None, *, trained_only: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Full parameters of the policy by name, gathered a few at a time. Collective: every rank must exhaust it.

        Every rank gets the tensors, each until the next one, which may use its memory. Tied parameters appear once.

        Args:
            dtype: what they will be cast to. An engine may cast its shards, so that ranks exchange and hold less.
            trained_only: leave out those that are frozen, which are not gathered either.
        """

    @abstractmethod
    def full_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and full shapes of ``named_full_parameters()``, without communication."""

    @abstractmethod
    def pieces(self) -> dict[str, Piece]:
        """This rank's pieces of `<parameter>.param`, `.exp_avg` and `.exp_avg_sq` for each trained parameter.

        The pieces are float32 views of the live state. To resume, fill them and call ``loaded``. No communication.
        """

    @abstractmethod
    def weights(self) -> dict[str, Piece]:
        """This rank's pieces of all parameters by name, also of those that are not trained. Views, as ``pieces()``."""

    def own_pieces(self) -> dict[str, Piece]:
        """The part of ``pieces()`` that this rank saves. The parts of all ranks cover every tensor exactly once."""
        return self.pieces()

    @abstractmethod
    def loaded(self, num_steps: int) -> None:
        """Adopt the filled pieces as the state after ``num_steps`` optimizer steps. Collective."""

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's ``value`` on every rank. Collective."""
        if self.world_size == 1:
            return value
        return gather_objects(value if self.rank == 0 else None, self.device)[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, by rank. Collective."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value)
        return values

    def lowest(self, mine: int) -> int:
        """The smallest of all ranks' values. Collective."""
        if self.world_size == 1:
            return mine
        box = torch.tensor(mine, device=self.device)
        torch.distributed.all_reduce(box, op=torch.distributed.ReduceOp.MIN)
        return int(box.item())

    def close(self) -> None:
        """Leave the process group."""
        leave_ranks()


def parameter_groups(policy: nn.Module, weight_decay: float) -> list[dict]:
    """AdamW groups: matrices decay, vectors (norms, biases) do not.

    The parameters of a group are sharded over one mesh of ranks, because fused kernels take no others together.
    """
    groups: dict[tuple[bool, Any], list[Tensor]] = {}
    for parameter in sorted((p for p in policy.parameters() if p.requires_grad), key=lambda p: p.ndim < 2):
        groups.setdefault((parameter.ndim >= 2, getattr(parameter, "device_mesh", None)), []).append(parameter)
    return [{"params": each, "weight_decay": weight_decay if decays else 0.0} for (decays, _), each in groups.items()]


def adamw(policy: nn.Module, finetune: FinetuneSection) -> torch.optim.AdamW:
    """Make the optimizer that every engine uses. Engines set its learning rate before each step."""
    options = finetune.optimizer
    groups = parameter_groups(policy, options.weight_decay)
    return torch.optim.AdamW(
        groups, lr=finetune.learning_rate, betas=options.betas, eps=options.eps, fused=supports_fused(groups)
    )


def supports_fused(groups: list[dict]) -> bool:
    """Whether the fused kernel takes these parameters: floats, in plain tensors or shards of FSDP2."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    return all(type(p.data) in (Tensor, DTensor) and p.is_floating_point() for p in parameters)


def create_moments(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
    """Create zero moments before the first step, so that a checkpoint can be read into them."""
    for parameter in parameters:
        device = parameter.device if optimizer.defaults["fused"] else "cpu"
        moments = {key: torch.zeros_like(parameter) for key in OPTIMIZER_STATES}
        optimizer.state[parameter] = {"step": torch.zeros((), device=device), **moments}


def set_step(optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    """Set the number of finished optimizer steps, which the bias correction of the moments uses."""
    for state in optimizer.state.values():
        state["step"].fill_(float(num_steps))
