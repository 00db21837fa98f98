"""Conversions at the border of a library: padded values, base-2 LSE, and rows without keys.

The state law of this project: natural-log LSE, [N, T]; a row that attends no key has output 0 and LSE -inf.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..kept_launches import KeptLaunch
from ..own import TRITON
from ..registry import imported


class Convention(NamedTuple):
    """How the LSE of a library differs from the state law. `lawful_state` converts it.

    Attributes:
        base_2: whether the LSE is log2(sum of exp(scores)).
        poison: whether a row with NaN may have a valid LSE; a row whose first output is NaN or infinite gets the LSE
            NaN.
        empty_is_inf: whether a row without keys has the LSE +inf (`without_empty_rows`).
    """

    base_2: bool = False
    poison: bool = False
    empty_is_inf: bool = False


def in_words(tensor: Tensor) -> Tensor:
    """Return `tensor`, or a contiguous copy of `tensor` if its rows are not whole, aligned words of 16 bytes.

    Kernels of other libraries load such words, and do not check the strides of every tensor.

    Args:
        tensor: any dimensions; the elements of the last dimension fill whole words.
    """
    return tensor if is_in_words(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def is_in_words(tensor: Tensor) -> bool:
    """Return whether each row of the last dimension consists of aligned words of 16 bytes."""
    return tensor.data_ptr() % 16 == 0 and _are_in_words(tensor.stride(), tensor.element_size())


@functools.lru_cache(maxsize=1024)
def _are_in_words(strides: tuple[int, ...], size: int) -> bool:
    """Return whether rows with these strides, in elements of `size` bytes, consist of words of 16 bytes."""
    *outer, inner = strides
    return inner == 1 and not any(stride * size % 16 for stride in outer)


def _own_launcher(name: str, tensor: Tensor) -> Callable | None:
    """Return a launcher of `fast.kernels.triton.conversion`; None for a CPU tensor, or without Triton."""
    if not tensor.is_cuda or TRITON.missing_package is not None:
        return None
    return imported(f"fast.kernels.triton.conversion:{name}")


class Widened:
    """Copy tensors [S, N, P] into wider tensors, one launch on a GPU.

    The object serves calls with equal shapes, strides, dtypes and alignments: the first call finds the compiled kernel,
    and later calls launch it again.
    """

    __slots__ = ("_kept", "_shape")

    def __init__(self):
        self._kept, self._shape = None, None

    def __call__(self, left: Tensor, right: Tensor | None, columns: int) -> Tensor:
        """Return a tensor with `left` in its first columns, and `right` or zeros in the columns after them.

        Args:
            left: [S, N, P].
            right: [S, columns - P] in the dtype of `left`, the columns that all heads share; None for zeros.
            columns: number of columns of the result, more than P.
        """
        if self._kept is not None:
            wide = left.new_empty(self._shape)  # `_shape` is set before `_kept`: another thread may be in a call
            if self._kept.again((left, left if right is None else right, wide)):
                return wide
        launch = _own_launcher("join_columns", left)
        if launch is None and right is None:
            return pad(left, (0, columns - left.shape[2]))
        if launch is None:
            return torch.cat((left, right[:, None].expand(-1, left.shape[1], -1)), dim=-1)
        self._shape = (*left.shape[:2], columns)
        wide = left.new_empty(self._shape)
        self._kept = launch(left, right, wide)
        return wide


def whole_keys(k: Tensor, k_pe: Tensor | None) -> Tensor:
    """Return keys in one tensor: `k` itself if it has all columns, and else a copy of both parts in one launch.

    Args:
        k: [S, N, P].
        k_pe: [S, R] in the dtype of `k`, the columns that all heads share; None if `k` has whole keys.

    Returns:
        [S, N, P + R].
    """
    return k if k_pe is None or k_pe.shape[1] == 0 else Widened()(k, k_pe, k.shape[2] + k_pe.shape[1])


def write_shared_columns(whole: Tensor, k_pe: Tensor) -> None:
    """Write the last columns of whole keys, which all heads share; the other columns stay.

    Args:
        whole: [S, N, P + R].
        k_pe: [S, R].
    """
    nope = whole.shape[2] - k_pe.shape[1]
    launch = None if torch.compiler.is_compiling() else _own_launcher("join_columns", whole)
    if launch is None:
        whole[..., nope:].copy_(k_pe[:, None])
    else:
        launch(whole[..., :nope], k_pe, whole)


def pad_columns(tensor: Tensor, columns: int) -> Tensor:
    """Return a copy of `tensor` with zeros behind its last dimension, or `tensor` itself if it is wide enough.

    Args:
        tensor: [..., V].
        columns: number of columns of the result, at least V.
    """
    missing = columns - tensor.shape[-1]
    if missing == 0:
        return tensor
    return Widened()(tensor, None, columns) if tensor.dim() == 3 else pad(tensor, (0, missing))


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


def with_poison(out: Tensor, lse: Tensor) -> Tensor:
    """Return an LSE that is NaN where the first output is NaN or infinite; some libraries give such rows another LSE.

    Args:
        out: [T, N, Dv], output of the library.
        lse: [N, T], LSE of the library, natural log.
    """
    return torch.add(lse, out[..., 0].T, alpha=0)


class StateConversion:
    """Convert what a library returns to the state law: one launch on a GPU, and none if there is nothing to convert.

    The object serves calls with equal shapes, strides, dtypes and alignments of the arguments. Each call looks at the
    layout of the library's tensors, because only the library decides on it.

    Args:
        convention: how the LSE differs from the state law.
        out_dtype: dtype of the output.
        columns: V; columns of the library's output after them are padding, and are cut.
    """

    __slots__ = ("_columns", "_convention", "_kept", "_out_dtype")

    def __init__(self, convention: Convention, out_dtype: torch.dtype, columns: int):
        self._convention, self._out_dtype, self._columns = convention, out_dtype, columns
        self._kept: _KeptConversion | None = None  # set as a whole, because another thread may be in a call

    def __call__(
        self, made: Tensor, made_lse: Tensor | None, out: Tensor | None = None, lse: Tensor | None = None,
        visible_lens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return the state; `lawful_state` explains the arguments and the result."""
        if made_lse is None and made is out:
            return out, None
        kept = self._kept
        if kept is not None and kept.layout == _layout_of(made, made_lse):
            target, new_lse = made if kept.returns_made else out, lse
            if kept.new_out is not None:
                source = made_lse if self._out_dtype == torch.float32 else made
                target = source.new_empty(kept.new_out, dtype=self._out_dtype)
            if kept.new_lse is not None:
                new_lse = made_lse.new_empty(kept.new_lse)
            seen = made_lse if visible_lens is None else visible_lens
            if kept.launch.again((made, made_lse, target, new_lse, seen)):
                return target if out is None else out, new_lse
        return self._convert(made, made_lse, out, lse, visible_lens)

    def _convert(
        self, made: Tensor, made_lse: Tensor | None, out: Tensor | None, lse: Tensor | None, visible_lens: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Convert a state, and keep the launch for later calls."""
        (tokens, heads, width), given_out, given_lse = made.shape, out, lse
        copies = visible_lens is not None
        if out is not None:
            copies = copies or made.data_ptr() != out.data_ptr()
        elif copies or made.dtype != self._out_dtype or width != self._columns or not made.is_contiguous():
            out, copies = made.new_empty((tokens, heads, self._columns), dtype=self._out_dtype), True
        else:
            out = made
        if made_lse is None:
            return (out.copy_(made if width == self._columns else made[..., : self._columns]) if copies else out), None
        lawful = not any(self._convention)
        if lse is None and not copies and lawful and made_lse.dim() == 2 and made_lse.is_contiguous():
            return out, made_lse
        launch = _own_launcher("convert_state", made)
        if launch is None:
            target = out if copies else None
            return _lawful_state(made, made_lse, self._convention, target, lse, visible_lens, out)
        if lse is None:
            lse = made_lse.new_empty((heads, tokens))
        kept = launch(made, made_lse, out if copies else None, lse, *self._convention, visible_lens)
        self._kept = None if kept is None else _KeptConversion(
            kept, _layout_of(made, made_lse), (tokens, heads, self._columns) if given_out is None and copies else None,
            (heads, tokens) if given_lse is None else None, not copies,
        )  # fmt: skip
        return out, lse


class _KeptConversion(NamedTuple):
    """What a `StateConversion` keeps of an earlier call.

    Attributes:
        launch: the launch of `convert_state`.
        layout: layout of the library's tensors in that call.
        new_out: shape of the output, if the call allocated the output; otherwise None.
        new_lse: shape of the LSE, if the call allocated the LSE; otherwise None.
        returns_made: whether the output of that call was the library's tensor itself.
    """

    launch: KeptLaunch
    layout: tuple
    new_out: tuple[int, ...] | None
    new_lse: tuple[int, ...] | None
    returns_made: bool


def _layout_of(made: Tensor, made_lse: Tensor | None) -> tuple:
    """Return what a kept launch of `convert_state` expects of the library's tensors."""
    if made_lse is None:
        return ()
    return (made.shape, made.stride(), made.dtype, made_lse.stride(), made_lse.dtype, made.data_ptr() % 16,
            made_lse.data_ptr() % 16)  # fmt: skip


def lawful_state(
    made: Tensor, made_lse: Tensor | None, convention: Convention, out_dtype: torch.dtype, columns: int,
    out: Tensor | None = None, lse: Tensor | None = None, visible_lens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Convert what a library returned to the state law (`StateConversion`).

    On a GPU, the function keeps the launch for later calls with equal shapes, strides, dtypes and alignments.

    Args:
        made: [T, N, at least V], output of the library. If `made` has the memory of `out`, it is not copied.
        made_lse: [N, T] or [N, B, Sq] with B Sq = T, float32, any strides; None for an output alone.
        convention: how the LSE differs from the state law.
        out_dtype: dtype of the output.
        columns: V; columns after them are padding, and are cut.
        out: [T, N, V] in `out_dtype`, any strides, written in place; None returns `made`, or allocates a tensor if the
            dtype or the number of columns differ, or if `made` is not contiguous.
        lse: [N, T], float32, written in place; None returns `made_lse`, or allocates a tensor.
        visible_lens: [T], int32; a token with no visible key has output 0 and LSE -inf, whatever the library returned.
            None if the library has a convention for such rows.

    Returns:
        out [T, N, V]; and lse [N, T], or None without `made_lse`.
    """
    if not made.is_cuda:
        return StateConversion(convention, out_dtype, columns)(made, made_lse, out, lse, visible_lens)
    into_out = out is not None and made.data_ptr() == out.data_ptr()
    layouts = tuple([
        None if each is None else (each.shape, each.stride(), each.dtype, each.data_ptr() % 16)
        for each in (out, lse, visible_lens)
    ])  # fmt: skip
    convert = _kept_conversion(convention, out_dtype, columns, made.shape, made.device, into_out, layouts)
    return convert(made, made_lse, out, lse, visible_lens)


@functools.lru_cache(maxsize=256)
def _kept_conversion(
    convention: Convention, out_dtype: torch.dtype, columns: int, shape: torch.Size, device: torch.device,
    into_out: bool, layouts: tuple[tuple | None, ...],
) -> StateConversion:  # fmt: skip
    """Return the conversion for all calls with these properties; only the first three arguments determine its result.

    Args:
        convention: how the LSE differs from the state law.
        out_dtype: dtype of the output.
        columns: V.
        shape: shape of the library's output.
        device: device of the tensors.
        into_out: whether the library has written into `out`.
        layouts: for each of `out`, `lse` and `visible_lens` its shape, strides, dtype and alignment, or None.
    """
    return StateConversion(convention, out_dtype, columns)


def _lawful_state(made, made_lse, convention, target, lse, visible_lens, out) -> tuple[Tensor, Tensor]:
    """Compute `lawful_state` with PyTorch: write the output to `target` if there is one, return `out` and the LSE."""
    found = made_lse.reshape(made.shape[1], made.shape[0])
    if convention.base_2:
        found = natural_lse(found)
    if convention.poison:
        found = with_poison(made, found)
    if convention.empty_is_inf:
        found = without_empty_rows(made, found)
    if visible_lens is not None:
        empty = visible_lens <= 0
        found, made = found.masked_fill(empty, -torch.inf), made.masked_fill(empty[:, None, None], 0)
    if target is not None:
        target.copy_(made[..., : target.shape[2]])
    return out, found.contiguous() if lse is None else lse.copy_(found)


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
    kept = torch.where(lse == -torch.inf, 0, torch.exp(lse - total))  # softmax weight of the keys
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
