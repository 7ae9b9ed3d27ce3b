"""Steps that share a proximal policy: which data are awaited, and the numbers of the loss in the later steps."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.synthetic_batches import make_samples, pack
from pipelinerl.finetune.accumulate import BatchRules, prepare_batch, train_step
from pipelinerl.finetune.batch_reader import BatchReader
from pipelinerl.finetune.engines.replicated import ReplicatedEngine
from pipelinerl.finetune.model import Policy
from pipelinerl.finetune.proximal import ProximalPolicy
from pipelinerl.finetune.rl.objective import LossSettings
from pipelinerl.records import MicroBatch
from tests.models import make_qwen2

VOCAB, STEPS = 48, 4
RULES = BatchRules(vocab_size=VOCAB, max_lag_steps=None, layout="cheaper", tokens_per_attention_unit=0)


class Stream:
    """All micro-batches of four steps, two per step."""

    position = 0

    def __init__(self) -> None:
        self.records: list[tuple[int, MicroBatch]] = []
        for step in range(STEPS):
            samples = make_samples(2, 6, vocab_size=VOCAB, lengths=(3, 14), step=step)
            self.records += enumerate(pack(samples, [[0, 1, 2], [3, 4, 5]], step=step), start=len(self.records))

    def poll(self, timeout_s: float) -> list[tuple[int, MicroBatch]]:
        found, self.records = self.records, []
        return found


def make_engine() -> ReplicatedEngine:
    torch.manual_seed(0)
    finetune = SimpleNamespace(
        dtype="float32",
        gradient_clipping_threshold=None,
        learning_rate=1e-2,
        optimizer=SimpleNamespace(name="adamw", kwargs={}, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0),
    )
    policy = Policy(make_qwen2(VOCAB, initializer_range=0.2).train(), chunk=5, temperature=0.8)
    return ReplicatedEngine(policy, SimpleNamespace(finetune=finetune), torch.device("cpu"))


@pytest.mark.parametrize(
    ("every", "expected"), [(None, [0, 1, 2, 3]), (1, [0, 1, 2, 3]), (2, [1, 1, 3, 3]), (3, [2, 2, 2, 3])]
)
def test_last_needed_is_the_end_of_the_block(every: int | None, expected: list[int]) -> None:
    assert [ProximalPolicy(every, STEPS).last_needed(step) for step in range(STEPS)] == expected


def test_every_step_of_a_block_has_the_logprobs_of_the_weights_before_it() -> None:
    """Blocks {0, 1, 2} and {3}: of step 2 those of version 0, although two updates came before; of step 3 its own."""
    engine, reader, proximal = make_engine(), BatchReader([("0/0", Stream())]), ProximalPolicy(3, STEPS)
    settings = LossSettings(policy_loss="ppo", proximal=True)
    before: dict[int, list[torch.Tensor]] = {}
    for step in range(STEPS):
        records = reader.next_step(step, 1.0, proximal.last_needed(step))
        assert records is not None
        if step in (0, 3):
            block = {step: records} | {later: reader.peek(later) for later in range(step + 1, 3 if step == 0 else 4)}
            before |= {
                n: [engine.evaluate(prepare_batch(r, RULES, engine.device)) for r in rs] for n, rs in block.items()
            }
        found = proximal.of_step(step, records, reader, engine, RULES)
        assert found is not None
        for mine, wanted in zip(found, before[step], strict=True):
            assert torch.equal(mine, wanted)
        own = engine.forward(prepare_batch(records[0], RULES, engine.device), settings).logprobs_K.detach()
        assert ((own - found[0]).abs().max() > 1e-3) == (step in (1, 2))
        assert (own - found[0]).abs().max() <= 1e-5 or step in (1, 2)
        metrics = train_step(engine, records, settings, RULES, 1e-2, found)
        assert (metrics["clip_fraction"] > 0) == (step in (1, 2)), "the clip acts once the policy has moved"


def test_run_resumed_inside_a_block_begins_one_there() -> None:
    engine, reader, proximal = make_engine(), BatchReader([("0/0", Stream())]), ProximalPolicy(4, STEPS)
    assert proximal.last_needed(2) == 3
    reader.next_step(0, 1.0)
    reader.next_step(1, 1.0)
    records = reader.next_step(2, 1.0, 3)
    assert records is not None
    assert proximal.of_step(2, records, reader, engine, RULES) is not None
    assert proximal.last_needed(3) == 3
