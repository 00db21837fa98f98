"""Launcher of the attention over packed requests (`flash_attn_varlen`) on Hopper."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from reference.interfaces import check

from ....backends import launch
from ...device import device_facts, device_of
from ...prescribed_splits import prescribed_splits
from ..common.descriptors import descriptor
from .combine import combine_splits
from .kernel import _varlen_kernel
from .records import ROWS, Constants, OutStrides
from .select import DTYPES, OUT_DTYPES, BatchSizes, Order, constants_of, order_of, parts_of

LEAST_SCALE = 1e-30  # replaces a softmax scale of 0: masked scores are -inf, and -inf * 0 would be NaN
MOST_SIZES = 4096  # size of the cache of `_launch_sizes`


def flash_attn_varlen(
    q: Tensor,
    k_nope: Tensor,
    k_pe: Tensor | None,
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
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention of packed requests of different lengths.

    A call with few query tiles and many keys divides the keys into splits (`select.best_num_splits`). The number of
    splits depends on the sizes of the whole batch, so the bits of a request may depend on the other requests. With
    `batch_invariant`, no call divides the keys.

    TMA reads a tensor in place if its rows are contiguous, its address and its strides are multiples of 16 bytes, and
    its strides are positive. Other tensors are copied first.

    Args:
        q: [T, N, P + R], bfloat16 or float16, any strides.
        k_nope: [S, N, P], part of the keys without rope, any strides; [S, N, P + R], the whole keys, if `k_pe` is None.
        k_pe: [S, R], rotated part of the keys, which all heads share, any strides; or None.
        v: [S, N, V], any strides.
        cu_seqlens_q: [B + 1], first query token of each request.
        cu_seqlens_k: [B + 1], first key of each request.
        max_seqlen_q: upper bound of the query tokens of a request; it changes only the number of splits.
        max_seqlen_k: upper bound of the keys of a request; it changes only the order of the work and the number of
            splits.
        softmax_scale: factor of the scores.
        causal: if True, a request's last query sees all keys, and each query sees one key less than the next query.
        out_dtype: dtype of the output: float32, bfloat16 or float16.
        out: [T, N, V] in `out_dtype`, any strides, written in place; None allocates `out` and `lse`.
        lse: [N, T], contiguous, written in place. If `out` is given and `lse` is None, no LSE is stored.
        batch_invariant: if True, the other requests do not change a bit of the result of a request.

    Returns:
        out [T, N, V], and lse [N, T] or None.

    Raises:
        ValueError: a dtype is not supported.
        UnsupportedConfiguration: the kernel does not serve keys or values of this width.
    """
    check(q.dtype in DTYPES, "q", "dtype bfloat16 or float16", q.dtype)
    check(out_dtype in OUT_DTYPES, "out_dtype", "float32, bfloat16 or float16", out_dtype)
    tokens, heads, _ = q.shape
    keys, _, nope = k_nope.shape
    value, requests = v.shape[2], cu_seqlens_q.shape[0] - 1
    if k_pe is not None and k_pe.shape[1] == 0:
        k_pe = None
    sizes = _launch_sizes(
        nope, 0 if k_pe is None else k_pe.shape[1], value,
        BatchSizes(
            tokens, keys, max(requests, 0), heads, max_seqlen_q, max_seqlen_k, bool(causal),
            1 if batch_invariant else prescribed_splits(),
        ),
        device_facts(q.device).processors,
    )  # fmt: skip
    constants, order = sizes.constants, sizes.order
    if out is None:
        out = torch.empty(tokens, heads, value, dtype=out_dtype, device=q.device)
        lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    if tokens == 0 or heads == 0 or requests <= 0:
        return out, lse
    if keys == 0:  # TMA cannot describe an empty tensor
        out.zero_()
        return out, lse if lse is None else lse.fill_(-math.inf)
    if softmax_scale < 0:  # the kernel finds the largest score before it multiplies by the scale
        q, softmax_scale = -q, -softmax_scale
    if sizes.whole:
        k_nope = torch.cat((k_nope, k_pe[:, None].expand(-1, heads, -1)), dim=-1)
        k_pe = None
    q, k_nope, v = in_boxes(q), in_boxes(k_nope), in_boxes(v)
    q_first, q_second = _parts(q, ROWS.value, constants)
    k_first, k_second = _parts(k_nope, constants.KEYS, constants._replace(SECOND=0) if constants.SHARED else constants)
    if constants.SHARED:
        shared = in_boxes(k_pe[:, None])
        k_second = _descriptor(shared, constants.KEYS, constants.SECOND)
    values = _descriptor(v, constants.KEYS, constants.VALUE)
    cu_seqlens_q = cu_seqlens_q.contiguous()
    num_splits, results = None, (out, lse, OutStrides(*out.stride()))
    if constants.SPLIT:
        num_splits = order.num_splits
        partial_out = torch.empty(num_splits * tokens * heads * value, dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(2 * num_splits * tokens * heads, dtype=torch.float32, device=q.device)
        results = partial_out, partial_lse, None
    elif rows_of_16_bytes(out):
        constants = constants._replace(WIDE_STORES=True)
    with device_of(q):
        taken = torch.zeros(1, dtype=torch.int32, device=q.device) if order.counts_items else cu_seqlens_q
        launch(
            _varlen_kernel, (order.programs,),
            q_first, q_second, k_first, k_second, values, cu_seqlens_q, cu_seqlens_k.contiguous(), taken,
            *results,
            tokens, keys, requests, heads, order.num_candidates, order.group_heads, num_splits, int(causal),
            max(softmax_scale, LEAST_SCALE) / math.log(2), c=constants, num_warps=4,
        )  # fmt: skip
    if constants.SPLIT:
        combine_splits(partial_out, partial_lse, cu_seqlens_q, num_splits, out, lse)
    return out, lse


class LaunchSizes(NamedTuple):
    """What a launch depends on besides its tensors.

    Attributes:
        constants: compile-time constants.
        whole: whether both parts of the keys must be joined.
        order: order of the work items, and number of splits.
    """

    constants: Constants
    whole: bool
    order: Order


@functools.lru_cache(MOST_SIZES)
def _launch_sizes(
    nope: int, rope: int, value: int, batch: BatchSizes, processors: int
) -> LaunchSizes:  # fmt: skip
    """Return the `LaunchSizes` of calls with these sizes."""
    parts = parts_of(nope, rope)
    constants = constants_of(parts, value)
    width = (parts.first if parts.shared else nope + rope) + value
    order = order_of(batch, width, constants.KEYS, processors)
    return LaunchSizes(constants._replace(SPLIT=order.num_splits > 1), parts.whole, order)


def in_boxes(x: Tensor) -> Tensor:
    """Return a tensor [tokens, heads, columns] that TMA can read: `x`, or a contiguous copy of `x`.

    A dim of size 1 may have any stride. `_descriptor` replaces such a stride.

    Raises:
        ValueError: a row of the copy does not consist of words of 16 bytes, so TMA cannot read it.
    """
    steps = [stride for size, stride in zip(x.shape[:2], x.stride()[:2], strict=True) if size > 1]
    fits = x.stride(2) == 1 and x.data_ptr() % 16 == 0
    if fits and all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in steps):
        return x
    check(x.shape[2] * x.element_size() % 16 == 0, "x", "rows of a multiple of 16 bytes", f"{x.shape[2]} columns")
    return x.clone(memory_format=torch.contiguous_format)


def rows_of_16_bytes(x: Tensor) -> bool:
    """Return whether the address and the strides of a tensor [tokens, heads, columns] allow stores of 16 bytes."""
    steps = x.stride(0) * x.element_size(), x.stride(1) * x.element_size(), x.data_ptr()
    return x.stride(2) == 1 and not any(step % 16 for step in steps)


def _descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return the TMA descriptor of a tensor [tokens, heads, width] as [heads, tokens, width]: boxes of one head."""
    tokens, heads, width = x.shape
    strides = [stride if size > 1 else width for size, stride in zip(x.shape[:2], x.stride()[:2], strict=True)]
    return descriptor(
        x.data_ptr(), x.dtype, (heads, tokens, width), (strides[1], strides[0], 1), (1, rows, columns),
        min(2 * columns, 128),
    )  # fmt: skip


def _parts(x: Tensor, rows: int, constants: Constants) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Return the descriptors of both parts of queries or whole keys; the same descriptor twice without second part."""
    first = _descriptor(x, rows, constants.FIRST)
    return first, first if constants.SECOND == 0 else _descriptor(x, rows, constants.SECOND)
