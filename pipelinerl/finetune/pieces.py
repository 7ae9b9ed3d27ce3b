"""Pieces of flattened tensors, and planners that save and load them with torch's distributed checkpoint.

Every training state is stored flat. Whole tensors (ddp), row shards (FSDP2) and flat ranges (ZeRO) are all ranges of
the flat tensor. A state that one engine wrote can therefore be read by another engine on another number of ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` … ``start + len(tensor)`` of a flattened tensor of ``whole`` elements."""

    tensor: Tensor
    """[n] a view of the memory that holds the state. Writing into it changes the state."""
    start: int
    whole: int

    def cut(self, rank: int, world_size: int) -> "Piece":
        """This rank's share of the piece. The shares of all ranks differ by at most one element."""
        first, end = (len(self.tensor) * number // world_size for number in (rank, rank + 1))
        return Piece(self.tensor[first:end], self.start + first, self.whole)

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    # The protocol of torch's planners.

    def size(self) -> torch.Size:
        return torch.Size([self.whole])

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        [chunk] = self.__create_chunk_list__()
        data = TensorWriteData(
            chunk=chunk, properties=TensorProperties.create_from_tensor(self.tensor), size=self.size()
        )
        return [WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=torch.Size([self.start]), sizes=self.tensor.size())]


Pieces = Mapping[str, Piece]


class PieceSavePlanner(DefaultSavePlanner):
    """Plans how pieces are written. Refuses pieces that overlap or leave gaps over all ranks."""

    def __init__(self, pieces: Pieces):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces
        self.set_up_planner(dict(pieces))

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._pieces[index.fqn].tensor


class PieceLoadPlanner(DefaultLoadPlanner):
    """Plans which parts of which files are read into the pieces."""

    def __init__(self, pieces: Pieces, metadata: Metadata):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces
        self.state_dict, self.metadata = dict(pieces), metadata

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._pieces[index.fqn].tensor
