"""Conversions at the border of a library: padded values and heads, base-2 LSE, and rows without keys.

The state law of this project: natural-log LSE, [N, T]; a row that attends no key has output 0 and LSE -inf.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn.functional import pad


def in_words(tensor: Tensor) -> Tensor:
    """Return `tensor`, or a contiguous copy of `tensor` if its rows are not whole, aligned words of 16 bytes.

    Kernels of other libraries load such words, and do not check the strides of every tensor.

    Args:
        tensor: any dimensions; the elements of the last dimension fill whole words.
    """
    return tensor if is_in_words(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def is_in_words(tensor: Tensor) -> bool:
    """Return whether each row of the last dimension consists of aligned words of 16 bytes."""
    size = tensor.element_size()
    *outer, inner = tensor.stride()
    return inner == 1 and tensor.data_ptr() % 16 == 0 and not any(stride * size % 16 for stride in outer)


def pad_columns(tensor: Tensor, columns: int) -> Tensor:
    """Return a copy of `tensor` with zeros behind its last dimension, or `tensor` itself if it is wide enough.

    Args:
        tensor: [..., V].
        columns: number of columns of the result, at least V.
    """
    missing = columns - tensor.shape[-1]
    return tensor if missing == 0 else pad(tensor, (0, missing))


def pad_heads(tensor: Tensor, heads: int) -> Tensor:
    """Return a copy of `tensor` with zeros for further heads, or `tensor` itself if it has enough heads.

    Args:
        tensor: [..., N, columns].
        heads: number of heads of the result, at least N.
    """
    missing = heads - tensor.shape[-2]
    return tensor if missing == 0 else pad(tensor, (0, 0, 0, missing))


def natural_lse(base_2_lse: Tensor) -> Tensor:
    """Convert an LSE in base 2, log2(sum of exp(scores)), to the natural logarithm."""
    return base_2_lse * math.log(2)


def without_empty_rows(out: Tensor, lse: Tensor) -> Tensor:
    """Return an LSE with -inf for the rows that attended no key, to which a library gives +inf.

    A library whose kernel divides by the sum of the exponentials gives +inf also to a row whose sum is NaN. The output
    of such a row is NaN, and its LSE becomes NaN.

    Args:
        out: [T, N, Dv], output of the library; the output of a row without keys must be 0.
        lse: [N, T], LSE of the library, natural log.
    """
    return torch.where(lse == torch.inf, out[..., 0].T - torch.inf, lse)  # 0 - inf is -inf, and NaN stays NaN


def rows_with_nan(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Return the rows [Sq, N] of a request whose query has a NaN, or that see a key with a NaN: their state is NaN.

    PyTorch's CPU kernel and its cuDNN kernel may give 0 to such a row.

    Args:
        q: [Sq, N, Dh].
        k: [S, Nkv, Dh].
        causal: whether the last query sees all keys, and each earlier query one key less than the query after it (Sq is
            then at most S); otherwise each query sees all keys.
    """
    keys = k.isnan().any(-1)
    seen = (keys.cumsum(0) > 0)[k.shape[0] - q.shape[0] :] if causal else keys.any(0, keepdim=True)
    return q.isnan().any(-1) | seen.repeat_interleave(q.shape[1] // k.shape[1], 1)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add the attention sinks to a state: each head gets one more key with the value 0.

    Args:
        out: [T, N, Dh], output without the sinks.
        lse: [N, T], natural-log LSE without the sinks.
        sinks: [N], scores of the sinks; None leaves the state unchanged.

    Returns:
        out [T, N, Dh], in float32 if there are sinks, and lse [N, T].
    """
    if sinks is None:
        return out, lse
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    kept = torch.where(lse == -torch.inf, 0, torch.exp(lse - total))  # share of the keys in the sum
    return out * kept.T[..., None], total


def grouped_state(
    made: Tensor, lse: Tensor, sinks: Tensor | None, out_dtype: torch.dtype, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the state of grouped-query attention that an op expects, from what a library returned.

    Args:
        made: [T, N, Dh], output of the library, without the sinks.
        lse: [N, T], natural-log LSE, float32, -inf for a row without keys.
        sinks: [N], or None.
        out_dtype: dtype of the output.
        out: [T, N, Dh] in `out_dtype`, any strides, written in place; None allocates a tensor.

    Returns:
        out [T, N, Dh] and lse [N, T], contiguous.
    """
    made, lse = with_sinks(made, lse, sinks)
    return (made.to(out_dtype) if out is None else out.copy_(made)), lse.contiguous()


def grouped_state_without_keys(
    q: Tensor, sinks: Tensor | None, out_dtype: torch.dtype, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the state of grouped-query attention of queries [T, N, Dh] that attend no key: output 0, LSE the sinks.

    See `grouped_state` for the other arguments.
    """
    out = q.new_zeros(q.shape, dtype=out_dtype) if out is None else out.zero_()
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32, device=q.device)
    return out, lse if sinks is None else lse.copy_(sinks[:, None])


@functools.lru_cache(maxsize=256)
def slopes_on_device(device: torch.device, slopes: tuple[float, ...]) -> Tensor:
    """Return ALiBi slopes on a device, [N] in float32, and keep them, because the copy to a GPU waits."""
    with torch.inference_mode(False):  # an inference tensor could not be used in other modes
        return torch.tensor(slopes, dtype=torch.float32, device=device)
