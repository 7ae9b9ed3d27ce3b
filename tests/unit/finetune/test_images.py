"""Encoded images become features in the places of tokens. Places and positions by hand."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from pipelinerl.errors import RecordError
from pipelinerl.finetune.data import in_rows, index_tokens, packed, to_batch
from pipelinerl.finetune.images import ImageReader, attention_of, embed, takes_images
from pipelinerl.records import MicroBatch
from tests.says import says
from tests.unit.finetune.test_data import make_record
from tests.vision import picture, save_descriptions, save_idefics3

SMALL, WIDE = picture(28, 28), picture(56, 28, seed=1)
"""The tiny Idefics3 shows 28 × 28 pixels as one tile and the whole, 56 × 28 as two and the whole: 4 tokens each."""


@pytest.fixture(scope="module")
def idefics(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ImageReader]:
    folder = save_idefics3(tmp_path_factory.mktemp("idefics3"))
    lm = AutoModelForImageTextToText.from_pretrained(folder)
    return lm, ImageReader(lm, str(folder))


def features_of(lm: Any, reader: ImageReader, image: bytes) -> torch.Tensor:
    return torch.cat([*lm.model.get_image_features(**reader.pixels([image]), return_dict=True).pooler_output])


def showing(image_id: int, *documents: list[Any]) -> MicroBatch:
    """A record of documents: token ids, and ``(image, count)`` for a mark, its placeholders and a mark."""
    ids: list[int] = []
    lengths, rows = [], []
    for document in documents:
        first = len(ids)
        for part in document:
            if isinstance(part, int):
                ids.append(part)
                continue
            rows.append((part[0], len(ids), len(ids) + part[1] + 2))
            ids += [5, *[image_id] * part[1], 6]
        lengths.append(len(ids) - first)
    total, count = len(ids), len(documents)
    ends = np.cumsum(lengths)
    return make_record(
        token_ids=np.array(ids, np.int32),
        segment_lengths=np.array(lengths, np.int32),
        segment_weights=np.ones(count, np.float32),
        spans=np.stack((ends - 1, ends, 0 * ends), axis=1).astype(np.int32),
        logprobs=np.zeros(total, np.float32),
        advantages=np.zeros(total, np.float32),
        rewards=np.zeros(count, np.float32),
        sequence_ids=tuple(f"s{i}" for i in range(count)),
        images=(SMALL, WIDE),
        image_spans=np.array(rows, np.int32),
    )


def counts(lm: Any, reader: ImageReader) -> tuple[int, int]:
    small, wide = (len(features_of(lm, reader, image)) for image in (SMALL, WIDE))
    return small, wide


@torch.no_grad()
@pytest.mark.parametrize("rows", [False, True])
def test_features_take_the_places_of_their_tokens_alone(idefics: tuple[Any, ImageReader], rows: bool) -> None:
    """The second document shows the first image again and then has the placeholder as a sampled token."""
    lm, reader = idefics
    image_id = reader.placeholder
    assert image_id is not None
    small, wide = counts(lm, reader)
    record = showing(image_id, [1, (1, wide), 2, (0, small), 3], [4, (1, wide), 7, image_id])
    batch = to_batch(
        record, index_tokens(record), layout=(in_rows if rows else packed)(record.segment_lengths), reader=reader
    )
    states = embed(lm, batch.input_ids, batch.images, reader.blank)
    first, second = (features_of(lm, reader, image) for image in (SMALL, WIDE))
    words = lm.get_input_embeddings()

    def text(*ids: int) -> torch.Tensor:
        return words(torch.tensor(ids))

    expected = torch.cat([text(1, 5), second, text(6, 2, 5), first, text(6, 3)])
    again = torch.cat([text(4, 5), second, text(6, 7, image_id)])
    found = (
        (states[0, : len(expected)], states[1, : len(again)]) if rows else states[0].split([len(expected), len(again)])
    )
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(found[1], again, rtol=0, atol=1e-5)


def test_prompt_with_other_tokens_than_features_is_refused(idefics: tuple[Any, ImageReader]) -> None:
    lm, reader = idefics
    assert reader.placeholder is not None
    small, wide = counts(lm, reader)
    record = showing(reader.placeholder, [1, (0, small), (1, wide + 1), 2])
    batch = to_batch(record, index_tokens(record), layout=packed(record.segment_lengths), reader=reader)
    with pytest.raises(RecordError, match=says(f"{small + wide} features", small + wide + 1)):
        embed(lm, batch.input_ids, batch.images, reader.blank)
    unequal = showing(reader.placeholder, [1, (0, small), 2], [1, (0, small - 1), (1, wide), 2])
    with pytest.raises(RecordError, match=says("image 0", f"{small} tokens", small - 1)):
        to_batch(unequal, index_tokens(unequal), layout=packed(unequal.segment_lengths), reader=reader)


def test_image_that_cannot_be_decoded_and_model_of_text_are_refused(idefics: tuple[Any, ImageReader]) -> None:
    _, reader = idefics
    assert reader.placeholder is not None
    record = msgspec.structs.replace(showing(reader.placeholder, [1, (0, 8), (1, 9), 2]), images=(SMALL, b"x"))
    with pytest.raises(RecordError, match=says("micro-batch 0", "step 7", "2 images", "1 bytes", "PNG")):
        to_batch(record, index_tokens(record), layout=packed(record.segment_lengths), reader=reader)
    with pytest.raises(RecordError, match=says("micro-batch 0", "step 7", "images", "none")):
        to_batch(record, index_tokens(record), layout=packed(record.segment_lengths))


def test_batch_of_text_gives_every_parameter_of_the_tower_a_gradient_of_zero(
    idefics: tuple[Any, ImageReader],
) -> None:
    lm, reader = idefics
    lm.zero_grad()
    embed(lm, torch.tensor([[1, 2, 3]]), None, reader.blank).sum().backward()
    tower = [parameter.grad for name, parameter in lm.named_parameters() if "vision" in name or "connector" in name]
    assert all(gradient is not None and not gradient.any() for gradient in tower)
    assert lm.get_input_embeddings().weight.grad[1].tolist() == [1.0] * 64
    lm.zero_grad()


def test_positions_of_height_and_width_restart_at_every_document(tmp_path: Path) -> None:
    """112 × 56 pixels are 8 × 4 patches of 14, merged by 2 into 4 × 2 tokens. Text goes on behind the longer side."""
    folder = save_descriptions(tmp_path, "qwen2_5_vl")
    with torch.device("meta"):
        lm = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    reader = ImageReader(lm, str(folder))
    assert takes_images(lm)
    ids = [10, 11, *[290] * 8, 12, 13, 20, 21, 290]
    record = make_record(
        token_ids=np.array(ids, np.int32),
        segment_lengths=np.array([12, 3], np.int32),
        spans=np.array([[11, 12, 0], [14, 15, 0]], np.int32),
        logprobs=np.zeros(15, np.float32),
        advantages=np.zeros(15, np.float32),
        images=(picture(112, 56),),
        image_spans=np.array([[0, 2, 10]], np.int32),
    )
    positions = to_batch(
        record, index_tokens(record), layout=packed(record.segment_lengths), reader=reader
    ).position_ids
    time, height, width = positions[:, 0].tolist()
    assert time == [0, 1, *[2] * 8, 6, 7, 0, 1, 2]
    assert height == [0, 1, 2, 2, 2, 2, 3, 3, 3, 3, 6, 7, 0, 1, 2]
    assert width == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 7, 0, 1, 2]
    rows = to_batch(record, index_tokens(record), layout=in_rows(record.segment_lengths), reader=reader).position_ids
    assert rows.shape == (3, 2, 12)
    assert rows[2, 0].tolist() == width[:12]
    assert rows[1, 1, :3].tolist() == [0, 1, 2]


def test_attention_of_a_tower_stays_its_own(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(save_descriptions(tmp_path, "qwen2_5_vl"))
    chosen = attention_of(config, "eager")
    assert isinstance(chosen, dict)
    assert (chosen["text_config"], chosen["vision_config"]) == ("eager", "sdpa")
    assert attention_of(config.get_text_config(), "eager") == "eager"
