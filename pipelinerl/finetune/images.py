"""Images in the trainer: encoded files become the inputs of the vision tower, its features take the places of tokens.

The places are those of the server's images, because a model can also sample the placeholder's id. An image goes through
the vision tower once, however many documents of a micro-batch show it.

Shapes: B × L the layout's grid, T tokens of a micro-batch, F tokens that show a piece of an image, D features.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoImageProcessor, PreTrainedModel

from pipelinerl.chat.images import open_image, placeholder_of
from pipelinerl.errors import ConfigError, RecordError
from pipelinerl.records import MicroBatch

BLANK_PIXELS = 56
"""Width and height of the image that the vision tower computes for a batch without images."""
TOWER_ATTENTION = "sdpa"
"""Attention of a vision tower, whose patches see each other in both directions."""


@dataclass(frozen=True, kw_only=True)
class ImageInputs:
    """The images of one batch."""

    pixels: dict[str, Tensor]
    """Arguments of the model's ``get_image_features`` for its distinct images."""
    places_F: Tensor
    """int64: flat grid index of each token that shows a piece of an image."""
    features_F: Tensor
    """int64: index of the feature that it shows."""
    num_features: int
    """D"""


def takes_images(lm: PreTrainedModel) -> bool:
    """Whether the model has a vision tower that ``embed`` can use."""
    return hasattr(lm, "get_image_features") and placeholder_of(lm.config) is not None


def attention_of(config: Any, attention: str) -> str | dict[str, str]:
    """transformers' setting by which the language model uses ``attention`` and a vision tower its own."""
    text = config.get_text_config()
    if text is config:
        return attention
    return {"": TOWER_ATTENTION} | {
        name: attention if getattr(config, name, None) is text else TOWER_ATTENTION for name in config.sub_configs
    }


class ImageReader:
    """Makes the inputs of one model's vision tower on the host.

    Args:
        lm: a model that ``takes_images``.
        source: its folder or name, which has the image processor.
    Raises:
        ConfigError: the image processor cannot be loaded.
    """

    def __init__(self, lm: PreTrainedModel, source: str, trust_remote_code: bool = False):
        placeholder = placeholder_of(lm.config)
        assert placeholder is not None, "the model takes no images"
        self.placeholder = placeholder
        self._arguments = set(inspect.signature(lm.get_image_features).parameters)
        self._rope_index = getattr(lm.base_model, "get_rope_index", None)
        try:
            self._processor = AutoImageProcessor.from_pretrained(source, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(f"model_path: the image processor of {source} cannot be loaded: {error}") from error

    def pixels(self, images: Sequence[bytes]) -> dict[str, Tensor]:
        """Returns the arguments of ``get_image_features``. Raises ``ValueError`` for what is no image."""
        return self._process([open_image(image) for image in images])

    @cached_property
    def blank(self) -> dict[str, Tensor]:
        """The same of a grey image."""
        from PIL import Image

        return self._process([Image.new("RGB", (BLANK_PIXELS, BLANK_PIXELS), "grey")])

    def _process(self, images: Sequence[Any]) -> dict[str, Tensor]:
        seen = self._processor(images=list(images), return_tensors="pt")
        return {name: value for name, value in seen.items() if name in self._arguments}

    def positions(self, record: MicroBatch, shown_T: np.ndarray, pixels: dict[str, Tensor]) -> np.ndarray | None:
        """int64 [3, T], restarting at every segment. None: the model's images take positions like text."""
        if self._rope_index is None or record.image_spans is None:
            return None
        ends = np.cumsum(record.segment_lengths.astype(np.int64))
        found = []
        for start, end in zip(ends - record.segment_lengths, ends, strict=True):
            inside = (record.image_spans[:, 1] >= start) & (record.image_spans[:, 1] < end)
            grids = {
                name: value[record.image_spans[inside, 0].astype(np.int64)]
                for name, value in pixels.items()
                if name == "image_grid_thw"
            }
            ids = torch.as_tensor(record.token_ids[start:end].astype(np.int64))[None]
            types = torch.as_tensor(shown_T[start:end].astype(np.int32))[None]
            positions = self._rope_index(ids, mm_token_type_ids=types, **grids)[0] if inside.any() else None
            found.append(torch.arange(end - start).expand(3, -1) if positions is None else positions[:, 0])
        return torch.cat(found, 1).numpy()


def read_images(
    record: MicroBatch, reader: ImageReader | None, flat: np.ndarray, positions: np.ndarray
) -> tuple[ImageInputs | None, np.ndarray]:
    """The images of ``record``, or None if it has none, and the position ids with them.

    Args:
        flat: int64 [T], place of each token in the layout's grid.
        positions: int64 [B, L], position ids of text.
    Raises:
        RecordError: they cannot be read as the server read them.
    """
    if record.image_spans is None:
        return None, positions
    where = f"micro-batch {record.index} of step {record.step}"
    if reader is None:
        raise RecordError(f"{where} has images, and the trainer's model takes none")
    try:
        pixels = reader.pixels(record.images)
    except ValueError as error:
        raise RecordError(f"{where}: one of its {len(record.images)} images: {error}") from error
    places, features = _shown(record, record.image_spans, reader.placeholder, where)
    shown_T = np.zeros(len(record.token_ids), dtype=bool)
    shown_T[places] = True
    inputs = ImageInputs(
        pixels=pixels,
        places_F=torch.as_tensor(flat[places]),
        features_F=torch.as_tensor(features),
        num_features=int(features.max(initial=-1)) + 1,
    )
    positions_T = reader.positions(record, shown_T, pixels)
    return inputs, positions if positions_T is None else _on_grid(positions_T, flat, positions.shape)


def _shown(record: MicroBatch, spans: np.ndarray, placeholder: int, where: str) -> tuple[np.ndarray, np.ndarray]:
    """(int64 [F], places of the tokens that show a piece of an image; int64 [F], the feature that each shows)."""
    indices = spans[:, 0].tolist()
    places = [
        start + np.flatnonzero(record.token_ids[start:end] == placeholder) for start, end in spans[:, 1:].tolist()
    ]
    counts = np.zeros(len(record.images), dtype=np.int64)
    for image, own in zip(indices, places, strict=True):
        if counts[image] not in (0, len(own)):
            raise RecordError(f"{where}: image {image} has {counts[image]} tokens and then {len(own)}")
        counts[image] = len(own)
    firsts = np.cumsum(counts) - counts
    features = [firsts[image] + np.arange(counts[image]) for image in indices]
    return np.concatenate(places), np.concatenate(features)


def _on_grid(positions_T: np.ndarray, flat: np.ndarray, grid: tuple[int, ...]) -> np.ndarray:
    """int64 [3, B, L] from positions [3, T]."""
    positions = np.zeros((3, grid[0] * grid[1]), dtype=np.int64)
    positions[:, flat] = positions_T
    return positions.reshape(3, *grid)


def embed(lm: PreTrainedModel, input_ids: Tensor, images: ImageInputs | None, blank: dict[str, Tensor]) -> Tensor:
    """[B, L, H]: embeddings of the tokens, with the features of the images in their places.

    ``blank``: pixels for a batch without images.

    Raises:
        RecordError: the vision tower computes another number of features than the server put into the prompts.
    """
    states = lm.get_input_embeddings()(input_ids)
    if images is None:
        if not torch.is_grad_enabled():
            return states
        # So every rank has a gradient for every parameter in every micro-batch.
        return states + 0 * _features(lm, {name: x.to(input_ids.device) for name, x in blank.items()}).sum()
    features_DH = _features(lm, images.pixels)
    if len(features_DH) != images.num_features:
        raise RecordError(
            f"the vision tower computes {len(features_DH)} features for images that have {images.num_features} tokens "
            "in the server's prompts: the servers and the trainer must read the same processor"
        )
    shown_FH = features_DH[images.features_F].to(states.dtype)
    return states.flatten(0, 1).index_copy(0, images.places_F, shown_FH).view_as(states)


def _features(lm: PreTrainedModel, pixels: dict[str, Tensor]) -> Tensor:
    """[D, H]"""
    found = lm.get_image_features(**pixels, return_dict=True).pooler_output
    parts = [found] if isinstance(found, Tensor) else found
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
