"""Supervised warm-up of a tiny model on its recipe's conversations.

Consumes conversations, emits nothing but changed weights. Assistant tokens weigh 1, all others 0.1: predicting the
question is what gives the numbers useful embeddings.
"""

import math
from random import Random

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pipelinerl.tiny_model.recipes import Recipe
from pipelinerl.tiny_model.tokenizer import TURN_END, TURN_START

LEARNING_RATE = 4e-3
RAMP_STEPS = 10
PROMPT_WEIGHT = 0.1


def assistant_mask(token_ids: list[int], header: list[int], turn_end: int) -> list[bool]:
    """True where the assistant speaks: after a turn header, up to and including the end of the turn."""
    mask, speaking = [], False
    for position, token in enumerate(token_ids):
        mask.append(speaking)
        if speaking:
            speaking = token != turn_end
        else:
            speaking = token_ids[max(0, position + 1 - len(header)) : position + 1] == header
    return mask


def batch_tensors(
    conversations: list[list[dict[str, str]]], tokenizer: PreTrainedTokenizerBase, cut_tokens: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns right-padded ids_BT (int64) and the weight of each token as a target, weights_BT (float32, padding 0)."""
    texts = tokenizer.apply_chat_template(conversations, tokenize=False)
    rows = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    encoded = [row.ids[:cut_tokens] for row in rows]
    header = tokenizer.encode(f"{TURN_START}assistant\n", add_special_tokens=False)
    turn_end = tokenizer.convert_tokens_to_ids(TURN_END)
    length = max(len(ids) for ids in encoded)
    ids_BT = torch.full((len(encoded), length), tokenizer.pad_token_id)
    weights_BT = torch.zeros(len(encoded), length)
    for row, ids in enumerate(encoded):
        mask = assistant_mask(ids, header, turn_end)
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        weights_BT[row, : len(ids)] = torch.tensor([1.0 if spoken else PROMPT_WEIGHT for spoken in mask])
    return ids_BT, weights_BT


def warm_up_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, rng: Random) -> float:
    """Trains in place on ``recipe.steps`` fresh batches with a cosine schedule. Returns the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    loss = math.nan
    model.train()
    for step in range(recipe.steps):
        rate = min(1.0, (step + 1) / RAMP_STEPS) * 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate
        conversations = [recipe.conversation(rng) for _ in range(recipe.batch_size)]
        ids_BT, weights_BT = batch_tensors(conversations, tokenizer, recipe.cut_tokens)
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
        losses_BT = torch.nn.functional.cross_entropy(
            logits_BTV[:, :-1].transpose(1, 2), ids_BT[:, 1:], reduction="none"
        )
        mean = (losses_BT * weights_BT[:, 1:]).sum() / weights_BT[:, 1:].sum()
        mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = mean.item()
    model.eval()
    return loss
