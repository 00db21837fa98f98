"""The workspace of a prefill: memory in which the cached context is gathered and expanded, chunk by chunk.

A chunk has at most `workspace_tokens` context tokens. To gather a chunk means to copy its cache entries out of the
cache. To expand a chunk means to compute keys and values of every head from these entries.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .checks import check, check_dtype, check_int, check_out, check_tensor, check_type
from .config import MLAConfig
from .context_chunk import ContextChunk, ContextParallelChunk

ALIGNED_ELEMENTS = 128  # each part of a workspace begins at a multiple of this number of elements


class ContextWorkspace:
    """Memory for one chunk, which all layers of a model use one after another.

    The memory has two parts: the gathered cache entries of a chunk, and its expanded keys and values. Under context
    parallelism, the second part first holds the cache entries that the rank sends and receives. The keys and values
    then overwrite these entries.

    A builder (`MLAMetadataBuilder`) has one workspace, and puts it into each plan with context. A layer to which the
    caller gave a workspace uses this workspace. All other layers use the workspace of the plan, so they share it.

    If no memory is given, the first layer that needs the workspace allocates the memory. If a later layer needs more
    elements, another dtype or another device, this layer allocates new memory. Memory that was given is never replaced.

    Two steps must not use a workspace at the same time: each CUDA stream and each thread needs its own workspace.

    Args:
        memory: [elements], contiguous, in the dtype and on the device of the layers. `context_workspace_size` returns
            the number of elements. None means that layers allocate the memory when they need it.

    Raises:
        TypeError: `memory` is neither a tensor nor None.
        ValueError: `memory` has another shape or dtype, or is not contiguous.
    """

    def __init__(self, memory: Tensor | None = None):
        if memory is not None:
            check_tensor("memory", memory, ("elements",))
            check(memory.is_contiguous(), "memory", "a contiguous tensor", f"strides {memory.stride()}")
        self.memory, self._given = memory, memory is not None

    def reserve(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the whole memory, a vector of at least `elements` elements; allocate the memory first if necessary.

        Args:
            elements: number of elements that the caller needs.
            dtype: dtype of the memory.
            device: device of the memory.

        Raises:
            TypeError: `device` is not a `torch.device`.
            ValueError: `dtype` is not supported; the memory was given by the caller, and is too small or has another
                dtype or device.
        """
        check_int("elements", elements, 0, below=2**48)  # 65536 tokens x 128 heads x (P + V = 256) = 2^31
        check_dtype("dtype", dtype)
        check_type("device", device, torch.device)
        memory = self.memory
        if self._given:
            check_tensor("workspace.memory", memory, ("elements",), (dtype,), device)
            check(memory.shape[0] >= elements, "workspace.memory", f"at least {elements} elements", memory.shape[0])
            return memory
        if memory is not None and memory.dtype == dtype and memory.device == device and memory.shape[0] >= elements:
            return memory
        if torch.compiler.is_compiling():  # compiled code must not change this object
            return torch.empty(elements, dtype=dtype, device=device)
        memory = self.memory = None  # free the old memory before the new memory is allocated
        with torch.inference_mode(False):  # an inference tensor could not be overwritten in later steps
            self.memory = torch.empty(elements, dtype=dtype, device=device)
        return self.memory


def check_context_workspace(argument: str, workspace: ContextWorkspace | None) -> None:
    """Check that an argument is a `ContextWorkspace` or None."""
    check_type(argument, workspace, (ContextWorkspace, type(None)), "a ContextWorkspace or None")


def aligned(elements: int) -> int:
    """Return `elements`, rounded up to a multiple of `ALIGNED_ELEMENTS`."""
    return -(-elements // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS


def expanded_elements(tokens: int, heads: int, nope: int, value: int) -> int:
    """Return the number of elements of the expanded keys [S, N, P] and values [S, N, V] of S tokens."""
    return aligned(tokens * heads * nope) + tokens * heads * value


def _elements(tokens: int, exchanged: int, head_size: int, expanded: int) -> int:
    """Return the number of elements of a workspace.

    Args:
        tokens: S, largest number of tokens of a chunk.
        exchanged: number of cache entries that a rank sends and receives for a chunk; 0 without context parallelism.
        head_size: Lkv + R, elements of a cache entry.
        expanded: number of elements of the expanded keys and values of S tokens.
    """
    return max(aligned(tokens * head_size) + expanded, (tokens + exchanged) * head_size)


def context_workspace_size(config: MLAConfig, workspace_tokens: int, context_parallel_size: int | None = None) -> int:
    """Return the number of elements of a `ContextWorkspace` for chunks of up to `workspace_tokens` tokens.

    For chunks of S tokens, the gathered entries need S (Lkv + R) elements, and the expanded keys and values need
    S N (P + V) elements. (Both numbers are rounded up for alignment.) With D ranks, a rank also sends S / D entries and
    receives S entries. These entries use the memory of the expanded keys and values. If this memory is too small for
    the entries, the workspace is larger.

    Args:
        config: config with the heads of this rank (`ContextParallel.local_config`).
        workspace_tokens: S, largest number of context tokens of a chunk.
        context_parallel_size: D, number of ranks that divide each sequence; None without context parallelism.

    Raises:
        TypeError: `config` is not an `MLAConfig`.
        ValueError: a number is below 1.
    """
    check_type("config", config, MLAConfig)
    check_int("workspace_tokens", workspace_tokens)
    exchanged = 0
    if context_parallel_size is not None:
        check_int("context_parallel_size", context_parallel_size, 1, "a positive int or None")
        exchanged = (context_parallel_size + 1) * -(-workspace_tokens // context_parallel_size)
    expanded = expanded_elements(workspace_tokens, config.num_heads, config.qk_nope_head_dim, config.v_head_dim)
    return _elements(workspace_tokens, exchanged, config.head_size, expanded)


def reserve_largest(
    workspace: ContextWorkspace,
    config: MLAConfig,
    workspace_tokens: int,
    context_parallel_size: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Reserve memory for any chunk of up to `workspace_tokens` tokens, and return two views of the memory.

    Args:
        workspace: the workspace.
        config: config with the heads of this rank.
        workspace_tokens: S, largest number of context tokens of a chunk.
        context_parallel_size: D, number of ranks that divide each sequence; None without context parallelism.
        dtype: dtype of the layer.
        device: device of the layer.

    Returns:
        Two views: [S, Lkv + R] for the gathered entries, and the memory after it, [elements], for the expanded keys and
        values.

    Raises:
        ValueError: the memory was given by the caller, and is too small or has another dtype or device.
    """
    memory = workspace.reserve(context_workspace_size(config, workspace_tokens, context_parallel_size), dtype, device)
    rows = workspace_tokens * config.head_size
    return memory[:rows].view(workspace_tokens, config.head_size), memory[aligned(rows) :]


def reserve_for_chunks(
    workspace: ContextWorkspace, chunks: Iterable[ContextChunk], latents: Tensor, k_pe: Tensor, w_uk: Tensor,
    w_uv: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Reserve memory in which each of these chunks can be gathered and expanded, and return two views of the memory.

    Args:
        workspace: the workspace.
        chunks: at least one chunk.
        latents: [T, Lkv], in the dtype and on the device of the workspace.
        k_pe: [T, R].
        w_uk: [Lkv, N, P].
        w_uv: [Lkv, N, V].

    Returns:
        Two views. The first view, [rows, Lkv + R], is the whole memory. A gather writes the entries of a chunk into the
        first rows of this view, and may use the other rows until the gather returns. The second view, [elements], is
        the memory after the rows of the longest chunk. It is for the expanded keys and values.
    """
    (_, heads, nope), value, head_size = w_uk.shape, w_uv.shape[2], latents.shape[1] + k_pe.shape[1]
    tokens, exchanged = max(chunk.num_tokens for chunk in chunks), 0
    for chunk in chunks:
        if isinstance(chunk, ContextParallelChunk):
            exchanged = max(exchanged, (chunk.ownership.size + 1) * chunk.padded_tokens)
    expanded = expanded_elements(tokens, heads, nope, value)
    memory = workspace.reserve(_elements(tokens, exchanged, head_size, expanded), latents.dtype, latents.device)
    rows = memory.shape[0] // head_size
    return memory[: rows * head_size].view(rows, head_size), memory[aligned(tokens * head_size) :]


def check_rows(workspace: Tensor, columns: int, rows: int, dtype: torch.dtype, device: torch.device) -> None:
    """Check a workspace [rows, columns], into which a gather writes."""
    check_tensor("workspace", workspace, ("rows", columns), (dtype,), device)
    gaps = "" if workspace.is_contiguous() else " with gaps"
    check(workspace.shape[0] >= rows and not gaps, "workspace", f"at least {rows} rows without gaps",
          f"{workspace.shape[0]} rows{gaps}")  # fmt: skip


def check_expansion(latents: Tensor, w_uk: Tensor, w_uv: Tensor, workspace: Tensor | None) -> None:
    """Check shapes, dtypes and devices of the arguments of `expand_kv`, but not their values."""
    check_tensor("kv_c_normed", latents, ("S", "Lkv"))
    dtypes, device = (latents.dtype,), latents.device
    check_tensor("w_uk", w_uk, (latents.shape[1], "N", "P"), dtypes, device)
    check_tensor("w_uv", w_uv, (*w_uk.shape[:2], "V"), dtypes, device)
    if workspace is None:
        return
    check_tensor("workspace", workspace, ("elements",), dtypes, device)
    least = expanded_elements(latents.shape[0], *w_uk.shape[1:], w_uv.shape[2])
    gaps = "" if workspace.is_contiguous() else " with gaps"
    check(workspace.shape[0] >= least and not gaps, "workspace", f"at least {least} elements without gaps",
          f"{workspace.shape[0]} elements{gaps}")  # fmt: skip


def check_no_overlap(workspace: Tensor | None, *inputs: Tensor) -> None:
    """Check that the memory of a workspace does not overlap the tensors `inputs`."""
    if workspace is not None:
        check_out("workspace", workspace, tuple(workspace.shape), workspace.dtype, workspace.device, *inputs)


def split_for_keys(workspace: Tensor, tokens: int, heads: int, nope: int, value: int) -> tuple[Tensor, Tensor]:
    """Return two vectors of a workspace: S N P elements for expanded keys, and S N V elements for expanded values."""
    keys = tokens * heads * nope
    return workspace[:keys], workspace[aligned(keys) : expanded_elements(tokens, heads, nope, value)]
