"""The workspace of a prefill: memory for the context of one chunk, gathered from the cache and expanded."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .checks import check, check_dtype, check_int, check_out, check_tensor, check_type
from .config import MLAConfig
from .context_chunk import ContextChunk, ContextParallelChunk

ALIGNED_ELEMENTS = 128  # a part of a workspace begins at a multiple of this number of elements, so that TMA can read it


class ContextWorkspace:
    """Memory for the context of one chunk, which all layers of a model use one after another.

    The memory has two parts. The first part has the gathered cache entries of a chunk. The second part has the expanded
    keys and values of the chunk. Under context parallelism, the second part first holds the cache entries that the rank
    sends and receives; these entries are no longer needed when the keys and values are written.

    A builder owns one workspace and puts it into each of its plans with context. A plan without a builder has its own
    workspace. So all layers that get the same plan share one workspace without further arguments. A layer does not own
    a workspace, because every layer of a model would then hold one. A layer that was made with `workspace=` uses that
    workspace, in the memory-profile run too.

    A workspace without given memory allocates its memory when a layer first needs it, because only the layer knows the
    dtype and the device. The size depends on `workspace_tokens` and not on the length of the context, so the memory is
    allocated once. The memory is replaced if a later layer needs more elements, another dtype or another device. Given
    memory is never replaced.

    Only one step may use a workspace at a time. Two CUDA streams need two workspaces, and so do two threads.

    Args:
        memory: [elements], contiguous, in the dtype and on the device of the layers. `context_workspace_size` returns
            the number of elements. None means that the workspace allocates its memory itself.

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
        """Return the whole memory, [at least `elements`]; allocate it first if it is missing or does not fit.

        Args:
            elements: number of elements that the caller needs.
            dtype: dtype of the memory.
            device: device of the memory.

        Raises:
            TypeError: `device` is not a `torch.device`.
            ValueError: `dtype` is not supported; the memory was given by the caller, and is too small or has another
                dtype or device.
        """
        check_int("elements", elements, 0, below=2**48)  # a chunk of 65536 tokens with 128 heads needs 2^31
        check_dtype("dtype", dtype)
        check_type("device", device, torch.device)
        memory = self.memory
        if self._given:
            check_tensor("workspace.memory", memory, ("elements",), (dtype,), device)
            check(memory.shape[0] >= elements, "workspace.memory", f"at least {elements} elements", memory.shape[0])
            return memory
        if memory is not None and memory.dtype == dtype and memory.device == device and memory.shape[0] >= elements:
            return memory
        if torch.compiler.is_compiling():  # the compiled graph owns its memory, and must not change this object
            return torch.empty(elements, dtype=dtype, device=device)
        memory = self.memory = None  # free the old memory before the new memory is allocated
        with torch.inference_mode(False):  # later steps may run outside of the inference mode of this step
            self.memory = torch.empty(elements, dtype=dtype, device=device)
        return self.memory


def check_context_workspace(argument: str, workspace: ContextWorkspace | None) -> None:
    """Check that an argument is a `ContextWorkspace` or None."""
    check_type(argument, workspace, (ContextWorkspace, type(None)), "a ContextWorkspace or None")


def aligned(elements: int) -> int:
    """Return a number of elements, rounded up to a multiple of `ALIGNED_ELEMENTS`."""
    return -(-elements // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS


def expanded_elements(tokens: int, heads: int, nope: int, value: int) -> int:
    """Return the elements of the expanded keys [S, N, P] and values [S, N, V] of S tokens in a workspace."""
    return aligned(tokens * heads * nope) + tokens * heads * value


def _elements(tokens: int, exchanged: int, head_size: int, expanded: int) -> int:
    """Return the elements of a workspace.

    Args:
        tokens: S, largest number of tokens of a chunk.
        exchanged: cache entries that a rank sends and receives for a chunk; 0 without context parallelism.
        head_size: Lkv + R.
        expanded: elements of the expanded keys and values of S tokens.
    """
    return max(aligned(tokens * head_size) + expanded, (tokens + exchanged) * head_size)


def context_workspace_size(config: MLAConfig, workspace_tokens: int, context_parallel_size: int | None = None) -> int:
    """Return the number of elements of a `ContextWorkspace` for chunks of up to `workspace_tokens` tokens.

    A workspace has S (Lkv + R + N (P + V)) elements, rounded up so that its parts are aligned. With D ranks, the rank
    also needs (D + 1) / D S entries of Lkv + R elements to exchange its tokens. These entries use the memory of the
    expanded keys and values. They make the workspace larger only if N (P + V) < (D + 1) / D (Lkv + R).

    Args:
        config: config with the heads of this rank (`ContextParallel.local_config`).
        workspace_tokens: S, largest number of context tokens of a chunk.
        context_parallel_size: D, ranks that share each sequence; None without context parallelism.

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
    """Reserve a workspace for every chunk of up to `workspace_tokens` tokens, and return its two parts.

    Args:
        workspace: the workspace.
        config: config with the heads of this rank.
        workspace_tokens: S, largest number of context tokens of a chunk.
        context_parallel_size: D, ranks that share each sequence; None without context parallelism.
        dtype: dtype of the layer.
        device: device of the layer.

    Returns:
        Two views: [S, Lkv + R] for the gathered context, and [elements], the memory after it, for expanded keys and
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
    """Return the two parts of a workspace in which any of these chunks can be gathered and expanded.

    Args:
        workspace: the workspace.
        chunks: at least one chunk.
        latents: [T, Lkv], in the dtype and on the device of the workspace.
        k_pe: [T, R].
        w_uk: [Lkv, N, P].
        w_uv: [Lkv, N, V].

    Returns:
        Two views. The first view, [rows, Lkv + R], is the whole memory as rows; a gather writes the context into the
        first rows, and may use all other rows until it returns. The second view, [elements], is the memory after the
        rows of the longest chunk, for expanded keys and values.
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
    """Check a workspace of rows, which a gather writes."""
    check_tensor("workspace", workspace, ("rows", columns), (dtype,), device)
    gaps = "" if workspace.is_contiguous() else " with gaps"
    check(workspace.shape[0] >= rows and not gaps, "workspace", f"at least {rows} rows without gaps",
          f"{workspace.shape[0]} rows{gaps}")  # fmt: skip


def check_expansion(latents: Tensor, w_uk: Tensor, w_uv: Tensor, workspace: Tensor | None) -> None:
    """Check shapes, dtypes and devices of the arguments of `expand_kv`; read no values."""
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
    """Check that the memory of a workspace has no element of the tensors that are read while it is written."""
    if workspace is not None:
        check_out("workspace", workspace, tuple(workspace.shape), workspace.dtype, workspace.device, *inputs)


def split_for_keys(workspace: Tensor, tokens: int, heads: int, nope: int, value: int) -> tuple[Tensor, Tensor]:
    """Return the parts of a checked workspace for expanded keys, [S N P], and for expanded values, [S N V]."""
    keys = tokens * heads * nope
    return workspace[:keys], workspace[aligned(keys) : expanded_elements(tokens, heads, nope, value)]
