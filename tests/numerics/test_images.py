"""Documents with images have the model's own log-probabilities, packed and in rows. Others are refused."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pipelinerl.errors import ConfigError
from pipelinerl.finetune.architecture import examine
from pipelinerl.finetune.attention import PACKED, packed_attention, register_attention
from pipelinerl.finetune.data import in_rows, index_tokens, packed, to_batch
from pipelinerl.finetune.image_check import SCORED, documents, own_logprobs
from pipelinerl.finetune.images import ImageReader, attention_of
from pipelinerl.finetune.model import Policy
from pipelinerl.finetune.small_copy import small_copy
from tests.says import says
from tests.vision import save_descriptions, save_idefics3


@pytest.fixture(scope="module", params=["idefics3", "qwen2_5_vl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiles beside tags of text, and positions of height and width."""
    folder = tmp_path_factory.mktemp(request.param)
    return save_idefics3(folder) if request.param == "idefics3" else save_descriptions(folder, request.param)


@pytest.fixture
def compared(folder: Path) -> tuple[Policy, ImageReader]:
    register_attention(PACKED, packed_attention)
    torch.manual_seed(0)
    from transformers import AutoConfig

    lm = small_copy(AutoConfig.from_pretrained(folder)).lm.eval()
    lm.set_attn_implementation("eager")
    reader = ImageReader(lm, str(folder))
    return Policy(lm, images=reader).eval(), reader


@torch.no_grad()
@pytest.mark.parametrize("rows", [False, True])
def test_logprobs_are_the_models_own_and_depend_on_the_images(compared: tuple[Policy, ImageReader], rows: bool) -> None:
    policy, reader = compared
    record = documents(policy.lm, reader)
    own = own_logprobs(policy.lm, reader, record)
    policy.lm.set_attn_implementation(attention_of(policy.lm.config, PACKED))
    found = policy(
        to_batch(
            record, index_tokens(record), layout=(in_rows if rows else packed)(record.segment_lengths), reader=reader
        )
    )
    assert (found - own).abs().max() <= 2e-5
    flat = to_batch(
        record, index_tokens(record), layout=(in_rows if rows else packed)(record.segment_lengths), reader=reader
    )
    assert flat.images is not None
    flat.images.pixels["pixel_values"].mul_(-1.0)
    other = policy(flat)
    assert (other - own).abs()[:SCORED].max() > 1e-3
    np.testing.assert_allclose(other[SCORED : 2 * SCORED], own[SCORED : 2 * SCORED], atol=2e-5)


@pytest.mark.parametrize("packing", [True, False])
def test_models_whose_images_take_the_places_of_tokens_are_accepted(folder: Path, packing: bool) -> None:
    assert examine(folder, packing=packing).attention == PACKED


def test_sequence_parallelism_with_images_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"seq_parallel is 2: .* takes images"):
        examine(folder, seq_parallel=2)


@pytest.mark.parametrize("model_type", ["qwen3_vl", "gemma3"])
def test_models_whose_images_do_more_are_refused(model_type: str, tmp_path: Path) -> None:
    """Qwen3-VL adds features in several layers, Gemma's images see themselves in both directions."""
    with pytest.raises(ConfigError, match=says("log-probs", "images", "not those")):
        examine(save_descriptions(tmp_path, model_type))


def test_model_without_its_image_processor_is_refused(tmp_path: Path) -> None:
    folder = save_descriptions(tmp_path, "qwen2_5_vl")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"image processor of .* cannot be loaded"):
        examine(folder)
