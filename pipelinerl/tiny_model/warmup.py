"""Warm-up of a tiny model on its recipe's conversations, as a run of `stage: sft` trains them.

The preprocessor's code renders, weighs and collates them, and the trainer's code computes the loss. Only the loop is
separate: the processes of a run would take longer to start than this takes.
"""

import math
from random import Random

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pipelinerl.chat.families import renderer_of
from pipelinerl.finetune.accumulate import BatchRules, prepare_batch
from pipelinerl.finetune.model import Policy
from pipelinerl.finetune.rl.objective import LossSettings
from pipelinerl.preprocess.batching import OptimizerBatch
from pipelinerl.preprocess.collate import Collation, collate
from pipelinerl.preprocess.conversation_rows import Conversation
from pipelinerl.preprocess.supervised import SupervisedData
from pipelinerl.tiny_model.recipes import Recipe

LEARNING_RATE = 4e-3
RAMP_STEPS = 10
"""Found by trying: the recipes learn their format within 300 steps."""
PROMPT_WEIGHT = 0.1
"""Weight of a question's tokens; an answer's weigh 1. Predicting questions gives the numbers useful embeddings."""


def warm_up_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, rng: Random) -> float:
    """Trains in place on ``recipe.steps`` fresh batches with a cosine schedule. Returns the last loss."""
    longest = recipe.cut_tokens or recipe.shape.positions
    data = SupervisedData(
        [Conversation(messages=recipe.conversation(rng)) for _ in range(recipe.steps * recipe.batch_size)],
        renderer_of(tokenizer),
        per_step=recipe.batch_size,
        seed=None,
        seq_length=longest,
        prompt_weight=PROMPT_WEIGHT,
    )
    collation = Collation(data_parallel_size=1, seq_length=recipe.batch_size * longest)
    rules = BatchRules(vocab_size=len(tokenizer), max_lag_steps=None, layout="rows", tokens_per_attention_unit=0)
    policy = Policy(model, chunk=recipe.batch_size * longest)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    loss = math.nan
    model.train()
    for step in range(recipe.steps):
        rate = min(1.0, (step + 1) / RAMP_STEPS) * 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate
        batch = OptimizerBatch(step=step, samples=data.samples(step), next_source=(0, 0))
        ((record,),) = collate(batch, collation)
        output = policy(prepare_batch(record, rules, torch.device("cpu")), LossSettings())
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = output.loss.item()
    model.eval()
    return loss
