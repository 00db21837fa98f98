"""What a CUDA graph of a decode step reads: the buffers of the batch, and the tensors of the plan.

A captured plan is a plan (the integers that attention needs) whose tensors a CUDA graph reads in every replay.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from .checks import check
from .gqa.metadata import GQAMetadata
from .metadata import MLAMetadata


class GraphMemory(NamedTuple):
    """Memory that a `DecodeGraph` keeps for the graphs of all its batch sizes, in bytes.

    Attributes:
        buffer_bytes: bytes of the buffers into which each run copies its batch. All batch sizes share these buffers.
        pool_bytes: bytes of the memory pool of all graphs. The pool has every tensor that a captured step allocates,
            such as its plan and its activations. 0 on a CPU, where no graph is captured.
    """

    buffer_bytes: int
    pool_bytes: int


@dataclass(eq=False)
class GraphBuffers:
    """The buffers of a `DecodeGraph` for B requests and T = B * query_len tokens. Write new values in place.

    Attributes:
        hidden_states: [T, H].
        positions: [T], position of each token in its request.
        seq_lens: [B], tokens of each request after the step; 0 for a padding row, which is no real request.
        query_start_loc: [B + 1], prefix sum of the query lengths. Tokens from `query_start_loc[-1]` on are padding.
        block_table: [B, W], block ids of each request.
        slot_mapping: [T], cache slot of each token; -1 for padding.
    """

    hidden_states: Float[Tensor, "T H"]
    positions: Int64[Tensor, " T"]
    seq_lens: Int32[Tensor, " B"]
    query_start_loc: Int32[Tensor, " B+1"]
    block_table: Int32[Tensor, "B W"]
    slot_mapping: Int64[Tensor, " T"]

    @classmethod
    def of_padding(
        cls, requests: int, query_len: int, max_blocks: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> GraphBuffers:
        """Allocate the buffers of a batch of padding rows: requests of length 0 with `query_len` query tokens each."""
        tokens = requests * query_len
        return cls(
            hidden_states=torch.zeros(tokens, hidden_size, dtype=dtype, device=device),
            positions=torch.zeros(tokens, dtype=torch.int64, device=device),
            seq_lens=torch.zeros(requests, dtype=torch.int32, device=device),
            query_start_loc=query_len * torch.arange(requests + 1, dtype=torch.int32, device=device),
            block_table=torch.zeros(requests, max_blocks, dtype=torch.int32, device=device),
            slot_mapping=torch.full((tokens,), -1, dtype=torch.int64, device=device),
        )

    def named(self) -> tuple[tuple[str, Tensor], ...]:
        """Return pairs of name and buffer, with names such as "buffers.seq_lens"."""
        return tuple((f"buffers.{field.name}", getattr(self, field.name)) for field in fields(self))

    @property
    def size_in_bytes(self) -> int:
        """Return the bytes of all buffers."""
        return sum(tensor.nbytes for _, tensor in self.named())


def captured_tensors(plan: MLAMetadata | GQAMetadata) -> tuple[tuple[str, Tensor | None], ...]:
    """Return pairs of name and tensor for the tensors that a graph reads; None for a tensor that the plan lacks."""
    decode, schedule = plan.decode, plan.schedule
    windows = (("captured.decode.first_visible", decode.first_visible),) if isinstance(plan, GQAMetadata) else ()
    return (
        ("captured.slot_mapping", plan.slot_mapping),
        ("captured.decode.block_table", decode.block_table),
        ("captured.decode.seq_lens", decode.seq_lens),
        ("captured.decode.query_start_loc", decode.query_start_loc),
        ("captured.decode.visible_lens", decode.visible_lens),
        ("captured.decode.total_seq_lens", decode.total_seq_lens),
        ("captured.schedule.tile_ranges", None if schedule is None else schedule.tile_ranges),
        ("captured.schedule.split_offsets", None if schedule is None else schedule.split_offsets),
        *((f"captured.decode.prepared[{number}]", tensor) for number, tensor in enumerate(decode.prepared)),
        *windows,
    )


def write_captured(captured: MLAMetadata | GQAMetadata, plan: MLAMetadata | GQAMetadata) -> None:
    """Copy the values of a plan into the tensors of a captured plan, which a graph reads.

    The function copies `visible_lens`, `first_visible` if the plan has it, the schedule, the tensors that the
    backend of the decode prepared and, under context parallelism, `seq_lens` and, for MLA, `total_seq_lens`. The caller
    writes the other tensors.

    Args:
        captured: the captured plan; the function writes its tensors.
        plan: plan of the next replay; the caller must call `check_captured` first.
    """
    if getattr(plan, "ownership", None) is not None:  # an `MLAMetadata` for one rank has no such field
        captured.decode.seq_lens.copy_(plan.decode.seq_lens)
    if plan.decode.total_seq_lens is not None:
        captured.decode.total_seq_lens.copy_(plan.decode.total_seq_lens)
    captured.decode.visible_lens.copy_(plan.decode.visible_lens)
    if isinstance(plan, GQAMetadata) and plan.decode.first_visible is not None:
        captured.decode.first_visible.copy_(plan.decode.first_visible)
    if captured.schedule is not None and captured.schedule.tile_ranges is not None:
        captured.schedule.tile_ranges.copy_(plan.schedule.tile_ranges)
        captured.schedule.split_offsets.copy_(plan.schedule.split_offsets)
    for held, new in zip(captured.decode.prepared, plan.decode.prepared, strict=True):
        held.copy_(new)


def check_not_replaced(
    captured: tuple[tuple[str, Tensor | None], ...], found: tuple[tuple[str, Tensor | None], ...]
) -> None:
    """Check that every tensor has the memory, shape, strides, dtype and device that it had at the capture.

    A graph reads the memory of its capture, so new values must be written into this memory.

    Args:
        captured: pairs of name and tensor at the capture.
        found: pairs of name and tensor now, in the same order.

    Raises:
        ValueError: a tensor was replaced.
    """
    for (name, held), (_, tensor) in zip(captured, found, strict=True):
        if tensor is not held:
            dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_nested
            same = held is not None and dense and _place(tensor) == _place(held)
            check(same, name, "the tensor of the capture (write new values into it)", "another tensor")


def _place(tensor: Tensor) -> tuple:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
