"""Checks before a run starts that documents with images get the model's own log-probabilities, packed and in rows.

The small random copy of ``architecture`` sees images through the model's real image processor. It is given whole
documents with the arguments that transformers documents, and the trainer a micro-batch with the same documents.
"""

import inspect
import io
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipelinerl.errors import ConfigError
from pipelinerl.finetune.data import Batch, in_rows, index_tokens, packed, to_batch
from pipelinerl.finetune.images import ImageReader, attention_of
from pipelinerl.finetune.model import Policy
from pipelinerl.finetune.rl.head import LogitMap
from pipelinerl.records import MicroBatch

SIZES = ((56, 84), (112, 56))
"""Width and height of the two images in pixels."""
KINDS = ("mm_token_type_ids", "token_type_ids")
"""Arguments that mark the tokens of images for models of transformers."""
SCORED = 5
"""Tokens at the end of each document that are compared."""


def check_images(
    lm: PreTrainedModel, reader: ImageReader, attention: str, logit_map: LogitMap, *, packing: bool, allowed: float
) -> None:
    """Compare the trainer's log-probs of documents with images with the model's own.

    Args:
        lm: a small random copy. Its attention is changed.
        attention: implementation that the trainer uses for the language model.
        packing: `finetune.seq_packing`.
        allowed: largest difference in nats.
    Raises:
        ConfigError: they differ.
    """
    name = type(lm).__name__
    record = documents(lm, reader)
    try:
        lm.set_attn_implementation("eager")
        own = own_logprobs(lm, reader, record)
        lm.set_attn_implementation(attention_of(lm.config, attention))
        policy = Policy(lm, chunk=64, logit_map=logit_map, images=reader).eval()
        with torch.no_grad():
            found = policy(_batch(record, reader, rows=not packing))
    except Exception as error:  # the model's code may raise anything
        raise ConfigError(
            f"model_path: {name} cannot be computed with images ({type(error).__name__}: {error}); use another model"
        ) from error
    difference = (found - own).abs().max().item()
    if not difference <= allowed:
        raise ConfigError(
            f"model_path: the trainer's log-probs of prompts with images are not those of {name} (off by "
            f"{difference:.2g} nats, {allowed} is allowed): its images do more than take the places of tokens, as "
            "where they see each other in both directions or enter several layers; use a model without it"
        )


def _batch(record: MicroBatch, reader: ImageReader, *, rows: bool) -> Batch:
    return to_batch(
        record, index_tokens(record), layout=(in_rows if rows else packed)(record.segment_lengths), reader=reader
    )


def documents(lm: PreTrainedModel, reader: ImageReader) -> MicroBatch:
    """A micro-batch of three documents: with the first image, without one, and with both."""
    images = tuple(_noise(size, seed) for seed, size in enumerate(SIZES))
    tokens: list[list[int]] = []
    spans, start = [], 0
    for shown in ([0], [], [1, 0]):
        ids = np.random.default_rng(len(tokens)).integers(1, 200, 7).tolist()
        for image in shown:
            count = _count(lm, reader, images[image])
            spans.append((image, start + len(ids), start + len(ids) + count))
            ids += [reader.placeholder] * count + [3, 4]
        tokens.append(ids + np.random.default_rng(9).integers(1, 200, SCORED).tolist())
        start += len(tokens[-1])
    lengths = np.array([len(ids) for ids in tokens], dtype=np.int32)
    ends = np.cumsum(lengths)
    zeros = np.zeros(start, dtype=np.float32)
    return MicroBatch(
        step=0,
        index=0,
        count=1,
        num_samples=3,
        num_tokens=3 * SCORED,
        next_source=(0, 0),
        logprobs=zeros,
        advantages=zeros,
        ref_logprobs=None,
        sequence_ids=("a", "b", "c"),
        token_ids=np.concatenate(tokens).astype(np.int32),
        segment_lengths=lengths,
        segment_weights=np.ones(3, dtype=np.float32),
        spans=np.stack((ends - SCORED, ends, 0 * ends), axis=1).astype(np.int32),
        rewards=np.zeros(3, dtype=np.float32),
        images=images,
        image_spans=np.array(spans, dtype=np.int32),
    )


@torch.no_grad()
def own_logprobs(lm: PreTrainedModel, reader: ImageReader, record: MicroBatch) -> Tensor:
    """[K] log-probs of the trained tokens by the model's own ``forward``, one document at a time."""
    found, start, taken = [], 0, inspect.signature(lm.forward).parameters
    spans = record.image_spans
    assert spans is not None
    for length in record.segment_lengths.tolist():
        ids = torch.as_tensor(record.token_ids[start : start + length].astype(np.int64))[None]
        inside = (spans[:, 1] >= start) & (spans[:, 1] < start + length)
        images = [record.images[index] for index in spans[inside, 0]]
        given: dict[str, Any] = reader.pixels(images) if images else {}
        given |= {name: (ids == reader.placeholder).int() for name in KINDS if name in taken}
        logits = lm(input_ids=ids, use_cache=False, **given).logits[0, -SCORED - 1 : -1].float()
        found.append(logits.log_softmax(-1).gather(1, ids[0, -SCORED:, None])[:, 0])
        start += length
    return torch.cat(found)


@torch.no_grad()
def _count(lm: PreTrainedModel, reader: ImageReader, image: bytes) -> int:
    """Number of features of an image."""
    found = lm.get_image_features(**reader.pixels([image]), return_dict=True).pooler_output
    parts = [found] if isinstance(found, Tensor) else found
    return sum(part.numel() // part.shape[-1] for part in parts)


def _noise(size: tuple[int, int], seed: int) -> bytes:
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
