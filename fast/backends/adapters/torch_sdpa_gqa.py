"""Grouped-query attention over packed keys with PyTorch's attention kernels, for "torch_flash" and "torch_cudnn".

The function `torch.nn.functional.scaled_dot_product_attention` returns no LSE, but PyTorch's internal ops behind it do.
Each launcher calls one of these ops, so it needs no setting of the process that chooses a kernel. If this PyTorch lacks
the op, the launcher raises an error and never takes another kernel.

The launchers call the kernel once for each request. They copy the offsets to the CPU first, which waits for the GPU. A
CUDA graph can therefore not capture these calls.

The kernels differ from this op in what they take:

- All kernels take fewer KV heads than query heads, so no key or value is copied for the heads of its group.
- The causal mask of the kernels begins at the first key, so the launchers use it only for as many queries as keys. If a
  request has more keys than queries, all queries see the first keys. The launchers attend these keys without a mask and
  the other keys with the causal mask, and merge both states in float32. This takes two kernel calls, and each partial
  output is rounded to the dtype of the queries. If a request has more queries than keys, the first queries see no key.
- The cuDNN kernel takes no request with a single key. The softmax weight of such a key is 1, so PyTorch operations
  compute the state.
- The CPU kernel returns 0 for a row that has only scores of NaN, if there are fewer than 16 keys. The launchers write
  NaN to each row whose query is NaN or that sees a key with a NaN, on a CPU and after the cuDNN kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from reference.interfaces import UnsupportedConfiguration

from .conversion import in_words, rows_with_nan, with_sinks, without_empty_rows

# Function from q [Sq, N, Dh], k and v [S, Nkv, Dh], the factor of the scores, and whether the mask is causal, to the
# state: out [Sq, N, Dh] and lse [N, Sq]. Sq and S are at least 1; with a causal mask they are equal.
_Kernel = Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]


def flash_varlen_attention(
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
    """Attend packed keys of grouped-query attention with PyTorch's flash attention kernel; wait for the GPU once.

    Args:
        q: [T, N, Dh], bfloat16 or float16, on a CPU also float32; on a GPU Dh is a multiple of 8, at most 256.
        k: [S, Nkv, Dh].
        v: [S, Nkv, Dh].
        cu_seqlens_q: [B + 1], first query token of each request.
        cu_seqlens_k: [B + 1], first key of each request.
        max_seqlen_q: not used.
        max_seqlen_k: not used.
        softmax_scale: factor of the dot products.
        attention_type: value of an `AttentionType`; a decoder has a causal mask.
        sliding_window: None, because the declaration excludes windows.
        attention_chunk_size: None, because the declaration excludes attention chunks.
        soft_cap: None.
        alibi_slopes: None.
        sinks: [N], or None. The launcher adds them from the LSE.
        out_dtype: bfloat16, float16 or float32.
        out: [T, N, Dh] in `out_dtype`, any strides, written in place; None allocates a tensor.

    Returns:
        out [T, N, Dh] and lse [N, T], natural log, float32. Tokens behind the last request get 0 and -inf.
    """
    return _attend(
        _flash, q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, attention_type == "decoder", sinks, out_dtype, out
    )


def cudnn_varlen_attention(
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
    """Attend packed keys of grouped-query attention with PyTorch's cuDNN kernel; wait for the GPU once.

    cuDNN compiles a kernel for each new shape, so the first call with a shape takes much longer than later calls. See
    `flash_varlen_attention` for the arguments and the result; the queries are bfloat16 or float16, and Dh is a multiple
    of 8, at most 128.
    """
    return _attend(
        _cudnn, q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, attention_type == "decoder", sinks, out_dtype, out
    )


def _attend(
    kernel: _Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    softmax_scale: float,
    causal: bool,
    sinks: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attend one request after another with `kernel`; see the launchers for the other arguments and the result."""
    out = q.new_empty(q.shape, dtype=out_dtype) if out is None else out
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    q_offsets, k_offsets = torch.stack((cu_seqlens_q, cu_seqlens_k)).tolist()  # waits for the GPU
    for request in range(len(q_offsets) - 1):
        rows = slice(q_offsets[request], q_offsets[request + 1])
        keys = slice(k_offsets[request], k_offsets[request + 1])
        if rows.start < rows.stop:
            state = attend_request(kernel, q[rows], k[keys], v[keys], softmax_scale, causal)
            out[rows], lse[:, rows] = with_sinks(*state, sinks)
    out[q_offsets[-1] :], lse[:, q_offsets[-1] :] = 0, -torch.inf  # tokens behind the last request
    return out, lse


def attend_request(
    kernel: _Kernel, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the state of one request, from one or two calls of a kernel whose causal mask begins at the first key.

    Args:
        kernel: the kernel.
        q: [Sq, N, Dh], Sq at least 1.
        k: [S, Nkv, Dh].
        v: [S, Nkv, Dh].
        softmax_scale: factor of the dot products.
        causal: if True, the last query sees all keys, and each earlier query sees one key less than the query after it.

    Returns:
        out [Sq, N, Dh], in float32 if two states were merged and otherwise in the dtype of `q`; and lse [N, Sq].
    """
    queries, keys = q.shape[0], k.shape[0]
    if keys == 0:
        return torch.zeros_like(q), q.new_full((q.shape[1], queries), -torch.inf, dtype=torch.float32)
    if not causal or queries == 1:
        return kernel(q, k, v, softmax_scale, False)
    if queries == keys:
        return kernel(q, k, v, softmax_scale, True)
    if queries > keys:
        hidden = queries - keys  # rows that see no key
        out, lse = attend_request(kernel, q[hidden:], k, v, softmax_scale, True)
        return pad(out, (0, 0, 0, 0, hidden, 0)), pad(lse, (hidden, 0), value=-torch.inf)
    context = keys - queries  # keys that all queries see
    prefix_out, prefix_lse = kernel(q, k[:context], v[:context], softmax_scale, False)
    suffix_out, suffix_lse = kernel(q, k[context:], v[context:], softmax_scale, True)
    # the arithmetic of the op `merge_attn_states`; both states attend at least one key
    difference = (prefix_lse - suffix_lse).T[..., None]  # [Sq, N, 1]
    out = prefix_out * torch.sigmoid(difference) + suffix_out * torch.sigmoid(-difference)
    return out, torch.logaddexp(prefix_lse, suffix_lse)


def _flash(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Call the flash attention kernel for one request; see `_Kernel`."""
    if q.device.type == "cpu":
        op = _op("torch_flash", "_scaled_dot_product_flash_attention_for_cpu")
        inputs = [x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v)]
        return _with_nan(*_called(op, *inputs, is_causal=causal, scale=softmax_scale), q, k, causal)
    op = _op("torch_flash", "_scaled_dot_product_flash_attention")
    out, lse = _called(op, in_words(q), in_words(k), in_words(v), is_causal=causal, scale=softmax_scale)
    return out, without_empty_rows(out, lse)  # the kernel gives the LSE +inf to a row whose sum is NaN


def _cudnn(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Call the cuDNN kernel for one request, or compute the state of a request with a single key; see `_Kernel`."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    if k.shape[0] == 1:
        return _attend_single_key(q, k, v, softmax_scale)
    op = _op("torch_cudnn", "_scaled_dot_product_cudnn_attention")
    options = dict(attn_bias=None, compute_log_sumexp=True, is_causal=causal, scale=softmax_scale)
    return _with_nan(*_called(op, q, k, v, **options), q, k, causal)


def _op(backend: str, name: str) -> Callable:
    """Return an internal op of PyTorch.

    Raises:
        UnsupportedConfiguration: this PyTorch lacks the op.
    """
    if not hasattr(torch.ops.aten, name):
        raise UnsupportedConfiguration([
            f"{backend}: needs a PyTorch with the op aten::{name}, which returns the LSE, found {torch.__version__}"
        ])  # fmt: skip
    return getattr(torch.ops.aten, name)


def _called(op: Callable, q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor]:
    """Call an op of PyTorch for one request, and return out [Sq, N, Dh] and lse [N, Sq]."""
    out, lse, *_ = op(*[x.transpose(0, 1)[None] for x in (q, k, v)], **options)  # inputs [1, heads, tokens, Dh]
    return out[0].transpose(0, 1), lse.reshape(q.shape[1], q.shape[0])  # cuDNN's LSE has one more axis


def _with_nan(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return a state with NaN in the rows of `rows_with_nan`, which has the other arguments.

    Args:
        out: [Sq, N, Dh].
        lse: [N, Sq].
        q: [Sq, N, Dh].
        k: [S, Nkv, Dh].
        causal: whether the mask is causal.
    """
    poisoned = rows_with_nan(q, k, causal)
    return out.masked_fill(poisoned[..., None], torch.nan), lse.masked_fill(poisoned.T, torch.nan)


def _attend_single_key(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """Return the state of a request with a single key: the LSE is the score, and the output is the value.

    Args:
        q: [Sq, N, Dh].
        k: [1, Nkv, Dh].
        v: [1, Nkv, Dh].
        softmax_scale: factor of the dot product.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    lse = (q.float() * k.float()).sum(-1) * softmax_scale
    weight = 1 + (lse - lse)  # 1, or NaN if the score is not finite
    return (weight[..., None] * v).to(q.dtype), lse.T
