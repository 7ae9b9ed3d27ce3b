"""The learning rate as a pure function of the step, so that no schedule state needs saving."""

import math

from pipelinerl.config.sections import FinetuneSection


def learning_rate(finetune: FinetuneSection, step: int) -> float:
    """Learning rate of optimizer step ``step`` (0-based).

    Warm-up rises linearly from a positive rate in step 0 to the peak in step ``num_warmup_steps``. `linear` and
    `cosine` then fall to 0 at step ``schedule_steps``, by default the last one.
    """
    kind, warmup = finetune.lr_scheduler_type, finetune.num_warmup_steps
    if kind == "constant":
        return finetune.learning_rate
    if step < warmup:
        return finetune.learning_rate * (step + 1) / (warmup + 1)
    if kind == "constant_with_warmup":
        return finetune.learning_rate
    last = finetune.schedule_steps or finetune.max_train_steps
    done = min((step - warmup) / max(last - warmup, 1), 1.0)
    factor = 1.0 - done if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return finetune.learning_rate * factor
