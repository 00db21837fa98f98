"""Adapter to `torch.nn.attention.varlen.varlen_attn`: PyTorch's flash attention kernel for packed requests, on a GPU.

The function exists in PyTorch 2.10. The adapter needs PyTorch 2.11 or later, because the function of 2.10 takes no
softmax scale. It has the same layouts as this project: packed requests, int32 offsets, and a natural-log LSE [N, T].
Its causal mask is aligned bottom-right: the kernel is FlashAttention 2, and PyTorch passes the lengths of the queries
and of the keys unchanged. (The top-left alignment of `scaled_dot_product_attention` does not apply to this function.)

The adapter converts what differs:

- The kernel needs values as wide as the keys. The adapter pads the values with zeros, and cuts the output.
- The kernel writes the dtype of the queries. For a float32 output, the adapter converts this output.
- The kernel gives the LSE +inf to a row without keys (`conversion.without_empty_rows`).

Grouped-query attention is served over packed keys alone, not over a paged cache. Attention sinks are added from the
LSE, which is one more pass over the output.

The declarations describe the kernel that is built into PyTorch. A program can replace this kernel for the whole process
(`torch.nn.attention.activate_flash_attention_impl`).
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from reference.interfaces import GraphSupport

from ..registry import Backend, OpSupport
from .conversion import (
    Convention,
    grouped_state,
    grouped_state_without_keys,
    in_words,
    without_empty_rows,
)
from .varlen_calls import VarlenCall

EMPTY_IS_INF = Convention(empty_is_inf=True)
ALL_KEYS, CAUSAL = (-1, -1), (-1, 0)  # windows of `varlen_attn`: keys before and after a query; -1 for no limit


def missing() -> list[str]:
    """Return why this PyTorch cannot serve the adapter; an empty list if it can."""
    parameters = _parameters()
    if parameters is None:
        return [f"needs PyTorch 2.11 or later, found {torch.__version__}: it has no torch.nn.attention.varlen"]
    lacking = [name for name in ("scale", "window_size") if name not in parameters]
    if lacking:
        return [
            f"needs PyTorch 2.11 or later, found {torch.__version__}: its varlen_attn has no parameter"
            f" {' and no parameter '.join(lacking)}"
        ]
    if not torch.backends.cuda.is_flash_attention_available():
        return [f"needs a PyTorch that is built with flash attention for GPUs, found {torch.__version__}"]
    return []


def _parameters() -> set[str] | None:
    """Return the names of the parameters of `varlen_attn`; None if this PyTorch has no such function.

    An import of the module imports torch's compiler, which takes more than a second. If the module is not imported yet,
    the names come from its source.
    """
    name = "torch.nn.attention.varlen"
    if name in sys.modules:
        return set(inspect.signature(sys.modules[name].varlen_attn).parameters)
    try:
        found = importlib.util.find_spec(name)
    except ImportError:  # this PyTorch has no torch.nn.attention
        return None
    return None if found is None or found.origin is None else _parameters_in(found.origin)


@functools.cache
def _parameters_in(path: str) -> set[str] | None:
    """Return the names of the parameters of `varlen_attn` in a source file; None if the file has no such function."""
    for node in ast.parse(Path(path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == "varlen_attn":
            arguments = node.args
            return {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return None


@functools.cache
def _library() -> Callable:
    """Return `varlen_attn`, which always returns the LSE and never splits the keys of a request, if it has a choice.

    The parameter `num_splits` is newer than 2.11. The kernel built into PyTorch does not split keys that are not paged;
    other kernels behind `varlen_attn` may do so, and their splits depend on the other requests of the batch.
    """
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    splits = {"num_splits": 1} if "num_splits" in inspect.signature(varlen_attn).parameters else {}
    return functools.partial(varlen_attn, return_aux=AuxRequest(lse=True), **splits)


class TorchVarlenCall(VarlenCall):
    """Attention of packed requests with `varlen_attn`, without waiting for the GPU."""

    convention = EMPTY_IS_INF

    def columns_of_values(self, dim: int, value: int) -> int:
        """Return `dim`, because the kernel needs values as wide as keys."""
        return dim

    def prepare(self, dtype: torch.dtype, longest_q: int, longest_k: int, scale: float, causal: bool) -> bool:
        """Keep the constant arguments; `varlen_attn` writes into no given tensor.

        With an upper bound of 1, the kernel would take another variant, with other tiles on some GPUs. A request must
        get the same bits in each batch.
        """
        self._longest = max(longest_q, 2), longest_k
        self._options = {"scale": scale, "window_size": CAUSAL if causal else ALL_KEYS}
        return False

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Call the library; return its output and its LSE."""
        return _library()(q, k, v, starts_q, starts_k, *self._longest, **self._options)


def kept_varlen(*arguments) -> TorchVarlenCall:
    """Return the function for later calls with the same signature."""
    return TorchVarlenCall(*arguments)


def flash_attn_varlen(*arguments) -> tuple[Tensor, Tensor | None]:
    """Compute attention of packed requests (`VarlenCall.__call__`)."""
    return TorchVarlenCall(*arguments)(*arguments)


def gqa_varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    attention_type: str,
    sliding_window: int | None,
    attention_chunk_size: int | None,
    soft_cap: float | None,
    alibi_slopes: Sequence[float] | None,
    sinks: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend packed keys of grouped-query attention, which are in no cache, without waiting for the GPU.

    Args:
        q: [T, N, Dh], bfloat16 or float16; Dh is a multiple of 8, at most 256.
        k: [S, Nkv, Dh].
        v: [S, Nkv, Dh].
        cu_seqlens_q: [B + 1], int32, first query token of each request.
        cu_seqlens_k: [B + 1], int32, first key of each request.
        max_seqlen_q: upper bound of the query lengths.
        max_seqlen_k: upper bound of the key lengths.
        softmax_scale: factor of the dot products.
        attention_type: value of an `AttentionType`; a decoder has a causal mask.
        sliding_window: number of keys of a window, the query's own key included; None for no window.
        attention_chunk_size: None, because the declaration excludes attention chunks.
        soft_cap: None.
        alibi_slopes: None.
        sinks: [N], or None. The adapter adds them from the LSE.
        out_dtype: dtype of `q`, or float32.
        out: [T, N, Dh] in `out_dtype`, any strides, written in place; None allocates a tensor.

    Returns:
        out [T, N, Dh] and lse [N, T], natural log, float32.
    """
    tokens, heads, _ = q.shape
    if tokens == 0 or k.shape[0] == 0:  # the kernel takes no empty tensors
        return grouped_state_without_keys(q, sinks, out_dtype, out)
    causal, before = attention_type == "decoder", -1 if sliding_window is None else sliding_window - 1
    grouped = {"enable_gqa": True} if _takes_groups() else {}
    if not grouped:
        k, v = (each.repeat_interleave(heads // each.shape[1], 1) for each in (k, v))
    made, lse = _library()(
        in_words(q), in_words(k), in_words(v), cu_seqlens_q, cu_seqlens_k, max(max_seqlen_q, 2), max_seqlen_k,
        scale=softmax_scale, window_size=(before, 0 if causal else before), **grouped,
    )  # fmt: skip
    return grouped_state(made, without_empty_rows(made, lse), sinks, out_dtype, out)


@functools.cache
def _takes_groups() -> bool:
    """Return whether `varlen_attn` takes fewer heads of keys than of queries; that of an older PyTorch does not."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


TORCH_VARLEN = Backend(
    name="torch_varlen",
    priority=-5,
    device_type="cuda",
    capability=(8, 0),
    ops={
        "flash_attn_varlen": OpSupport(
            f"{__name__}:flash_attn_varlen",
            kept_call=f"{__name__}:kept_varlen",
            dtypes=(torch.bfloat16, torch.float16),
            out_dtypes=(torch.bfloat16, torch.float16, torch.float32),
            head_dims={"qk_head_dim": tuple(range(8, 257, 8))},
            whole_keys=True,
            narrow_values=True,
            masks=("causal",),
        ),
        "gqa_varlen_attention": OpSupport(
            f"{__name__}:gqa_varlen_attention",
            dtypes=(torch.bfloat16, torch.float16),
            out_dtypes=(torch.bfloat16, torch.float16, torch.float32),
            head_dims={"head_dim": tuple(range(8, 257, 8))},
            masks=("causal",),
            features=("sinks", "window"),
            graph=GraphSupport.NONE,
            only_named=True,
        ),
    },
    library="PyTorch",
    install="pip install 'torch>=2.11'",
    missing_artifacts=f"{__name__}:missing",
)
