"""Calls of libraries whose attention of packed requests takes q [T, N, D], k [S, N, D] and v [S, N, V] of one dtype.

A `VarlenCall` serves all calls with one signature (`fast.backends.kept_calls`): it looks once at shapes, strides and
alignments. Besides the call of the library, a call has

- one padded copy of `v` if the kernel needs values as wide as keys,
- copies of tensors whose rows are not aligned words of 16 bytes,
- one conversion of the LSE, with the output if its dtype, width or place differs (`conversion.StateConversion`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .conversion import Convention, StateConversion, Widened, in_words, is_in_words


class VarlenCall:
    """Attention of packed requests by a library, for calls with equal properties.

    A subclass has the attribute `convention` and the methods `columns_of_values`, `prepare` and `attend`.

    Attributes:
        convention: how the LSE of the library differs from the state law.
        allocates: True, because an object made for calls with `out` and without an LSE also serves calls with `out`
            None and without an LSE (`OpSupport.kept_call`). The result is then the library's own tensor, without a
            copy, unless its dtype or width differs.

    The constructor has the arguments of the first call (`__call__`); later calls have equal shapes, strides, dtypes,
    devices, alignments and numbers.
    """

    convention: Convention
    allocates = True

    def __init__(
        self, q: Tensor, k: Tensor, k_pe: None, v: Tensor, starts_q: Tensor, starts_k: Tensor, longest_q: int,
        longest_k: int, scale: float, causal: bool, out_dtype: torch.dtype, out: Tensor | None = None,
        lse: Tensor | None = None,
    ):  # fmt: skip
        (tokens, heads, dim), value = q.shape, v.shape[2]
        self._with_lse = out is None or lse is not None
        # the libraries refuse empty tensors, or give another LSE
        self._is_empty = tokens == 0 or heads == 0 or k.shape[0] == 0
        self._convert = StateConversion(self.convention, out_dtype, value)
        if self._is_empty:
            return
        self._columns = self.columns_of_values(dim, value)
        self._widened = Widened() if self._columns > value else None
        given = (q, k, starts_q, starts_k) if self._widened is not None else (q, k, v, starts_q, starts_k)
        self._copies = not all(each.is_contiguous() if each.dim() == 1 else is_in_words(each) for each in given)
        takes_out = self.prepare(q.dtype, longest_q, longest_k, scale, causal)
        self._directs = (
            takes_out and out is not None and self._widened is None and out.dtype == q.dtype and is_in_words(out)
        )  # whether the library writes into `out`

    def columns_of_values(self, dim: int, value: int) -> int:
        """Return how many columns the values must have for keys of `dim` columns: `value`, or more if padded."""
        raise NotImplementedError

    def prepare(self, dtype: torch.dtype, longest_q: int, longest_k: int, scale: float, causal: bool) -> bool:
        """Keep the function of the library and its constant arguments; return whether `attend` can write into `out`.

        Args:
            dtype: dtype of queries, keys and values.
            longest_q: upper bound of the query lengths.
            longest_k: upper bound of the key lengths.
            scale: factor of the scores.
            causal: whether the mask is causal, aligned bottom-right.
        """
        raise NotImplementedError

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Call the library; return its output and its LSE. `out` is None, or the tensor that the library writes."""
        raise NotImplementedError

    def __call__(
        self,
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
        """Compute attention of packed requests.

        Args:
            q: [T, N, D].
            k: [S, N, D], whole keys.
            k_pe: None, because the declarations ask for whole keys.
            v: [S, N, V], V at most D.
            cu_seqlens_q: [B + 1], first query token of each request.
            cu_seqlens_k: [B + 1], first key of each request; S may be larger than the last number.
            max_seqlen_q: upper bound of the query lengths.
            max_seqlen_k: upper bound of the key lengths.
            softmax_scale: factor of the scores.
            causal: if True, the last query of a request sees all keys, and each earlier query sees one key less than
                the query after it.
            out_dtype: dtype of the output.
            out: [T, N, V] in `out_dtype`, any strides, written in place; None allocates `out`.
            lse: [N, T], float32, written in place; None allocates `lse`, or leaves it out if the first call had `out`
                and no `lse`.

        Returns:
            out [T, N, V] and lse [N, T], natural log, float32; None in place of an LSE that is left out. Rows without
            keys: output 0 and LSE -inf.
        """
        if self._is_empty:
            return self._without_keys(q, v, out_dtype, out, lse)
        if self._widened is not None:
            v = self._widened(v, None, self._columns)
        if self._copies:
            q, k, v = in_words(q), in_words(k), in_words(v)
            cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
        target = out if self._directs else None
        made, made_lse = self.attend(q, k, v, cu_seqlens_q, cu_seqlens_k, target)
        return self._convert(made if target is None else target, made_lse if self._with_lse else None, out, lse)

    def _without_keys(self, q, v, out_dtype, out, lse):
        """Return the state of queries without keys, or of no queries."""
        tokens, heads, _ = q.shape
        out = q.new_zeros(tokens, heads, v.shape[2], dtype=out_dtype) if out is None else out.zero_()
        if self._with_lse:
            lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device) if lse is None else lse
            lse.fill_(-torch.inf)
        return out, lse
