"""What a rank writes of one tensor, and where it reads one into: its own part as boxes of the true shape.

DCP asks objects that are no tensors for their chunks, so a part needs no communication, and stage, bucket size and
world size leave no trace in what is written.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType

from zero_shard.checkpoint.rectangles import rectangles
from zero_shard.layout import Segment


class _Box(NamedTuple):
    chunk: ChunkStorageMetadata
    sizes: tuple[int, ...]  # in the order of memory
    start: int  # in the part


class Part:
    """The boxes that make up this rank's part of one parameter, or of state of the parameter's shape.

    Args:
        view: A tensor of the parameter's shape and strides.
        segment: Which elements of it, in the order of memory; None: none.
    """

    def __init__(self, view: Tensor, segment: Segment | None) -> None:
        self.shape = view.shape
        self.numel = 0 if segment is None else segment.numel
        self._boxes: dict[torch.Size, _Box] = {}
        self._place: list[int] = []
        if segment is None:
            return
        strides = view.stride()
        # In memory the dimensions lie in the order of their strides, which need not be that of the shape.
        order = sorted(range(view.dim()), key=lambda dim: (-strides[dim], view.shape[dim] == 1, dim))
        place = self._place = sorted(range(view.dim()), key=order.__getitem__)
        lengths = tuple(view.shape[dim] for dim in order)
        for box in rectangles(lengths, segment.param_start, segment.param_start + segment.numel):
            offsets, sizes = (torch.Size(each[dim] for dim in place) for each in (box.offsets, box.sizes))
            start = box.start - segment.param_start
            self._boxes[offsets] = _Box(ChunkStorageMetadata(offsets, sizes), box.sizes, start)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the boxes, as DCP asks for them."""
        return [box.chunk for box in self._boxes.values()]

    def box(self, index: MetadataIndex, flat: Tensor) -> Tensor:
        """Return the box at an offset of the true shape, an alias of the 1-d part ``flat`` [numel]."""
        assert index.offset is not None
        _, sizes, start = self._boxes[index.offset]
        return flat[start : start + math.prod(sizes)].view(sizes).permute(self._place)


class Source(Part):
    """A part to be written.

    Args:
        read: Gives the part, 1-d in memory order: an alias, or decoded when it is asked for.
        dtype: Of the part.
    """

    def __init__(self, view: Tensor, segment: Segment, read: Callable[[], Tensor], dtype: torch.dtype) -> None:
        super().__init__(view, segment)
        self._read, self._dtype = read, dtype

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        """Return the boxes as DCP writes them."""
        properties = TensorProperties(dtype=self._dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def tensor(self, index: MetadataIndex) -> Tensor:
        """Return the box at an offset."""
        return self.box(index, self._read())


class Sink(Part):
    """A part to be read.

    Args:
        target: Gives the memory that is read into, 1-d in memory order: the live one, or room until all is here.
        finish: Called with that memory when all of it has been read.
    """

    def __init__(
        self,
        view: Tensor,
        segment: Segment | None,
        target: Callable[[], Tensor],
        finish: Callable[[Tensor], None] | None = None,
    ) -> None:
        super().__init__(view, segment)
        self._make_target, self._finish = target, finish
        self._target: Tensor | None = None
        self._num_missing = self.numel

    def target(self, index: MetadataIndex) -> Tensor:
        """Return what the box at an offset is read into."""
        if self._target is None:
            self._target = self._make_target()
        return self.box(index, self._target)

    def note_read(self, numel: int) -> None:
        """Note that so many elements have been read."""
        self._num_missing -= numel
        if self._num_missing > 0 or self._target is None:
            return
        if self._finish is not None:
            self._finish(self._target)
        self._target = None


class Value:
    """Something that is no tensor and is written as one piece, whatever containers it consists of, as it is now.

    Attributes:
        content: What ``torch.load(weights_only=True)`` reads; without tensors in the older of torch's formats, which
            has a tenth of the size.
    """

    def __init__(self, value: Any) -> None:
        stream = io.BytesIO()
        torch.save(value, stream, _use_new_zipfile_serialization=_has_tensor(value))
        self.content = stream.getvalue()


def _has_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tensor, value.values()))
    return isinstance(value, Tensor) or (isinstance(value, list | tuple | set) and any(map(_has_tensor, value)))


class SavePlanner(DefaultSavePlanner):
    """Finds the boxes of sources, which are no tensors."""

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return what is to be written."""
        found = self.state_dict[write_item.index.fqn]
        if isinstance(found, Source):
            return found.tensor(write_item.index)
        if isinstance(found, Value):
            return io.BytesIO(found.content)
        data: Tensor | io.BytesIO = super().resolve_data(write_item)
        return data


class LoadPlanner(DefaultLoadPlanner):
    """Finds the boxes of sinks, which are no tensors, and tells them what has been read."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take over what is to be read. The default would replace every value that it does not know by None."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator
        self.flatten_state_dict = False  # keys are flat here

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return what is read into."""
        found = self.state_dict[index.fqn]
        return found.target(index) if isinstance(found, Sink) else super().lookup_tensor(index)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Note that a piece has been read."""
        found = self.state_dict[read_item.dest_index.fqn]
        if isinstance(found, Sink):
            found.note_read(math.prod(read_item.lengths))
