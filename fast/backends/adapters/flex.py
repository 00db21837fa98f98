"""Adapter to `torch.nn.attention.flex_attention`: PyTorch's Triton kernel with a programmable mask, on a GPU.

The adapter attends all requests of a batch in one call, with a block mask: a list of the blocks of 128 keys that each
block of 128 queries attends. It builds the block mask on the GPU from the offsets of the requests, without waiting for
the GPU.

A block of keys must not have keys of two requests. The kernel multiplies hidden values by a probability of 0, and a NaN
in a value of one request would reach the output of another request. The adapter therefore copies queries, keys and
values so that each request begins at a new block, with zeros behind its last token.

PyTorch compiles one graph for the attention, for each combination of dtype, number of heads, widths, softmax scale,
mask, dtype of the output and need for the LSE, and once more for calls with a single request. Other numbers of tokens
and of requests need no new graph, except where PyTorch has assumed that two numbers are always equal. The first call of
each combination takes many seconds. The copies and the block mask are not compiled: PyTorch 2.11 compiled the places of
the queries wrongly.

`flex_gqa` has grouped-query attention.

The library returns the state law of this project: a natural-log LSE, output 0 and LSE -inf for a row without keys.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple, no_type_check

import torch
from torch import Tensor
from torch.nn.functional import pad

from reference.interfaces import GraphSupport

from ..own import missing as missing_package
from ..registry import Backend, OpSupport

BLOCK = 128  # queries, and keys, of a block of the block mask
_NUMBERS = itertools.count()  # one number for each compiled combination
# torch.compile traces the functions with the decorator `no_type_check`. The decorator keeps run-time checks of types,
# which an import hook may add to all functions, out of the trace.


def missing() -> list[str]:
    """Return why this PyTorch cannot serve the adapter; an empty list if it can."""
    try:
        from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention  # noqa: F401
    except ImportError:
        return [f"needs PyTorch 2.9 or later, found {torch.__version__}: its flex_attention has no AuxRequest"]
    return []


def flash_attn_varlen(
    q: Tensor,
    k: Tensor,
    k_pe: None,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention of packed requests of different lengths, with an LSE, without waiting for the GPU.

    Args:
        q: [T, N, D], bfloat16 or float16; D at least 16.
        k: [S, N, D], whole keys.
        k_pe: None, because the declaration asks for whole keys.
        v: [S, N, V], V at least 16.
        cu_seqlens_q: [B + 1], int32, first query token of each request.
        cu_seqlens_k: [B + 1], int32, first key of each request. S may be larger than the last element.
        max_seqlen_q: not used.
        max_seqlen_k: not used.
        softmax_scale: factor of the scores.
        causal: if True, the last query of a request sees all keys, and each earlier query sees one key less than the
            query after it.
        out_dtype: dtype of `q`, or float32.
        out: [T, N, V] in `out_dtype`, any strides, written in place; None allocates `out` and the LSE.
        lse: [N, T], float32, written in place; None if `out` is given and the caller needs no LSE.

    Returns:
        out [T, N, V], and the LSE [N, T] or None.
    """
    tokens, heads, width = q.shape[0], q.shape[1], v.shape[2]
    needs_lse = out is None or lse is not None
    if tokens == 0 or k.shape[0] == 0:  # the kernel takes no empty tensors
        out = q.new_empty(tokens, heads, width, dtype=out_dtype) if out is None else out
        if needs_lse:
            lse = q.new_empty(heads, tokens, dtype=torch.float32) if lse is None else lse
            lse.fill_(-torch.inf)
        return out.zero_(), lse
    attend = _compiled(q.dtype, heads, q.shape[2], width, softmax_scale, causal, needs_lse, out_dtype)
    with torch.no_grad():
        made, found = attend(*prepared(q, k, v, cu_seqlens_q, cu_seqlens_k, causal))
    if needs_lse:
        lse = found if lse is None else lse.copy_(found)
    return made if out is None else out.copy_(made), lse


@functools.cache
def _compiled(
    dtype: torch.dtype, heads: int, qk_head_dim: int, v_head_dim: int, softmax_scale: float, causal: bool,
    needs_lse: bool, out_dtype: torch.dtype,
) -> Callable:  # fmt: skip
    """Return `attend_aligned`, compiled for one combination of the properties that its graph has.

    PyTorch limits the number of graphs of each code object, so each combination gets code objects of its own.
    """
    # The scale must be a constant of the graph. PyTorch makes a float an input of the graph, but not a text.
    scale = repr(softmax_scale)
    attend = lambda q, k, v, mask, row: attend_aligned(  # noqa: E731  a code object of its own for each combination
        q, k, v, mask, row, float(scale), needs_lse, out_dtype
    )
    attend.__code__ = attend.__code__.replace(co_name=f"attend_aligned_{next(_NUMBERS)}")
    return torch.compile(attend, fullgraph=True, dynamic=True)


class AlignedInputs(NamedTuple):
    """First arguments of `attend_aligned`, in its order."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: MaskTensors
    row: Tensor


@no_type_check
def prepared(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, causal: bool
) -> AlignedInputs:
    """Return the first arguments of `attend_aligned`; see `flash_attn_varlen` for the arguments."""
    queries, keys = blocks_of(cu_seqlens_q, q.shape[0]), blocks_of(cu_seqlens_k, k.shape[0])
    token = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)
    request = torch.searchsorted(cu_seqlens_q[1:], token, right=True)
    row = token - cu_seqlens_q[request] + BLOCK * queries.first[request]
    return AlignedInputs(
        aligned(q, queries), aligned(k, keys), aligned(v, keys), mask_tensors(queries, keys, causal), row
    )


@no_type_check
def attend_aligned(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskTensors, row: Tensor, softmax_scale: float, needs_lse: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute attention of requests that begin at blocks, with one call of flex_attention.

    Args:
        q: [1, N, places of queries, D].
        k: [1, N, places of keys, D].
        v: [1, N, places of keys, V].
        mask: tensors of the mask.
        row: [T], place of each query token.
        softmax_scale: factor of the scores.
        needs_lse: whether the LSE is returned.
        out_dtype: dtype of the output.

    Returns:
        out [T, N, V] in `out_dtype`, and the LSE [N, T] in float32; None without `needs_lse`.
    """
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    blocks = BlockMask.from_kv_blocks(
        mask.partial,
        mask.partial_blocks,
        mask.full,
        mask.full_blocks,
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda batch, head, query, key: (
            (key >= mask.first_key[query // BLOCK])
            & (key < mask.end_key[query // BLOCK])
            & (key <= query + mask.late[query // BLOCK])
        ),
        seq_lengths=(q.shape[2], k.shape[2]),
        compute_q_blocks=False,
    )
    made, aux = flex_attention(q, k, v, block_mask=blocks, scale=softmax_scale, return_aux=AuxRequest(lse=needs_lse))
    out = made[0].index_select(1, row).transpose(0, 1).to(out_dtype).contiguous()
    return out, aux.lse[0].index_select(1, row) if needs_lse else None


class Blocks(NamedTuple):
    """Places of the tokens of packed requests in a tensor in which each request begins at a new block.

    Attributes:
        count: number of blocks of the tensor, at least as many as the requests need.
        lens: [B + 1], number of tokens of each request; the last element is 0.
        first: [B + 1], first block of each request; the last element is the block after the last request.
        request: [count], request of each block; B for the blocks after the last request.
        token: [count * BLOCK], index of the packed token at each place; -1 for a place without a token.
    """

    count: int
    lens: Tensor
    first: Tensor
    request: Tensor
    token: Tensor


@no_type_check
def blocks_of(offsets: Tensor, tokens: int) -> Blocks:
    """Return the places of packed tokens in blocks.

    Args:
        offsets: [B + 1], prefix sum of the lengths of the requests.
        tokens: number of packed tokens, at least the last element of `offsets`.
    """
    lens = pad(offsets.diff(), (0, 1))
    ends = ((lens + BLOCK - 1) // BLOCK).cumsum(0, dtype=torch.int32)
    first = pad(ends[:-1], (1, 0))
    count = tokens // BLOCK + offsets.shape[0] - 1
    block = torch.arange(count, dtype=torch.int32, device=offsets.device)
    request = torch.searchsorted(ends[:-1], block, right=True)
    place = torch.arange(BLOCK, dtype=torch.int32, device=offsets.device)
    within = BLOCK * (block - first[request])[:, None] + place
    token = torch.where(within < lens[request][:, None], offsets[request][:, None] + within, -1)
    return Blocks(count, lens, first, request, token.flatten())


@no_type_check
def aligned(tensor: Tensor, blocks: Blocks) -> Tensor:
    """Return a copy of packed tokens in which each request begins at a new block, with zeros at the other places.

    Args:
        tensor: [tokens, N, columns].
        blocks: places of the tokens.

    Returns:
        [1, N, count * BLOCK, columns].
    """
    copied = tensor.index_select(0, blocks.token.clamp(min=0))
    return torch.where((blocks.token < 0)[:, None, None], 0, copied).transpose(0, 1)[None]


class MaskTensors(NamedTuple):
    """The mask by which each request attends its own keys.

    It lists the blocks of keys that each block of queries attends. All queries of the block attend each key of a *full*
    block. They attend some of the keys of a *partial* block.

    Attributes:
        partial: [1, 1, blocks of queries], number of partial blocks.
        partial_blocks: [1, 1, blocks of queries, blocks of keys]; the first `partial` elements are the partial blocks.
        full: [1, 1, blocks of queries], number of full blocks.
        full_blocks: [1, 1, blocks of queries, blocks of keys]; the first `full` elements are the full blocks.
        first_key: [blocks of queries], place of the first key of the request of a block.
        end_key: [blocks of queries], place after the last key of the request.
        late: [blocks of queries], upper bound of (place of a key) - (place of a query) for a visible key.
    """

    partial: Tensor
    partial_blocks: Tensor
    full: Tensor
    full_blocks: Tensor
    first_key: Tensor
    end_key: Tensor
    late: Tensor


@no_type_check
def mask_tensors(queries: Blocks, keys: Blocks, causal: bool) -> MaskTensors:
    """Return the mask of requests.

    Args:
        queries: blocks of the queries.
        keys: blocks of the keys, of the same requests.
        causal: whether the mask is causal, aligned bottom-right.
    """
    own, first = keys.lens[queries.request], keys.first[queries.request]
    shift = own - queries.lens[queries.request]  # query i of a request sees its keys 0 to i + shift
    block = torch.arange(queries.count, dtype=torch.int32, device=own.device)
    begin = BLOCK * (block - queries.first[queries.request])  # number i of the first query of the block
    end = torch.minimum(begin + BLOCK, queries.lens[queries.request])
    if causal:  # number of keys that the last query of the block sees, and the first query
        some, every = (torch.minimum((number + shift).clamp(min=0), own) for number in (end, begin + 1))
    else:
        some, every = own, own
    full = every // BLOCK
    partial = (some + BLOCK - 1) // BLOCK - full
    column = torch.arange(keys.count, dtype=torch.int32, device=own.device)
    lists = [(at[:, None] + column).clamp(max=keys.count - 1)[None, None] for at in (first + full, first)]
    first_key = BLOCK * first
    late = first_key + shift + begin - BLOCK * block if causal else torch.full_like(first, BLOCK * keys.count)
    return MaskTensors(partial[None, None], lists[0], full[None, None], lists[1], first_key, first_key + own, late)


_GQA = dict(
    dtypes=(torch.bfloat16, torch.float16),
    out_dtypes=(torch.bfloat16, torch.float16, torch.float32),
    head_dims={"head_dim": tuple(range(16, 257))},
    features=("alibi", "attention_chunk", "sinks", "soft_cap", "window"),
    batch_invariant=False,  # a batch with one request has a graph of its own
    graph=GraphSupport.NONE,
)
FLEX = Backend(
    name="flex",
    priority=-10,
    device_type="cuda",
    capability=(8, 0),
    ops={
        "flash_attn_varlen": OpSupport(
            f"{__name__}:flash_attn_varlen",
            dtypes=(torch.bfloat16, torch.float16),
            out_dtypes=(torch.bfloat16, torch.float16, torch.float32),
            head_dims={"qk_head_dim": tuple(range(16, 257)), "v_head_dim": tuple(range(16, 257))},
            whole_keys=True,
            masks=("causal",),
        ),
        **{
            op: OpSupport(f"fast.backends.adapters.flex_gqa:{op}", **_GQA)
            for op in ("gqa_paged_attention", "gqa_varlen_attention")
        },
    },
    missing_package=missing_package("triton"),
    library="PyTorch",
    install="pip install triton",
    missing_artifacts=f"{__name__}:missing",
    only_named=True,
)
