"""Softmax attention over packed sequences, with the log-sum-exp (LSE) of the scores.

"Packed" means that the tokens of all requests follow each other in one tensor, without padding.
`reference.attention.varlen` explains how attention rounds, and how tests judge the errors of a kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from reference.interfaces import (
    AttentionState,
    QueryLenSupport,
    check_attention,
    check_attention_settings,
    check_dtype,
    check_eager_offsets,
    check_flag,
    check_longest,
    check_offsets,
    check_out,
    wide_dtype,
)

from .. import backends
from ..backends import BackendChoice
from ..backends.adapters.conversion import Widened, whole_keys
from ..backends.kept_calls import KeptCall, kept_function
from ..backends.positive_scales import serves_scale, with_positive_scale


def flash_attn_varlen(
    q: Float[Tensor, "T N D"],
    k: Float[Tensor, "S N D"],
    v: Float[Tensor, "S N Dv"],
    cu_seqlens_q: Int32[Tensor, " offsets"],
    cu_seqlens_k: Int32[Tensor, " offsets"],
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    out_dtype: torch.dtype | None = None,
    *,
    batch_invariant: bool = False,
    backend: BackendChoice = None,
) -> AttentionState:
    """Compute softmax attention of packed requests: the queries of a request attend the keys of the same request.

    See `reference.attention.varlen` for the arithmetic. A request may have more keys than queries. With a causal mask,
    the last query of a request sees all keys of the request, and each earlier query sees one key less than the query
    that follows it.

    Args:
        q: [T, N, D]; in this module, D is the head dim of queries and keys.
        k: [S, N, D].
        v: [S, N, Dv]; Dv may differ from D.
        cu_seqlens_q: [B + 1], prefix sum of the query lengths; a length may be 0.
        cu_seqlens_k: [B + 1], prefix sum of the key lengths; a length may be 0.
        max_seqlen_q: upper bound of the query lengths. It sets the size of the launch and may choose the kernel. On a
            GPU the caller guarantees the bound: if a request is longer, its result may be wrong, and rows of it may
            stay unwritten. For CPU tensors the bound is checked.
        max_seqlen_k: upper bound of the key lengths, with the same guarantee. It may choose the kernel and the splits
            of the keys.
        softmax_scale: factor of the scores.
        causal: if True, each query sees no key after its own position.
        out_dtype: dtype of the output; None means the dtype of `q`.
        batch_invariant: if True, the other requests of the call do not change a bit of the result of a request. Some
            kernels are then slower: for example, they do not divide the keys of a request into splits.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Returns:
        out [T, N, Dv] and lse [N, T].

    Raises:
        ValueError: shapes, dtypes or devices do not match. For CPU tensors also: a value of `cu_seqlens_q` or
            `cu_seqlens_k` is smaller than the value before it, or its last value is not T (`cu_seqlens_q`) or S
            (`cu_seqlens_k`); a request is longer than `max_seqlen_q` or `max_seqlen_k`.
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    inputs = AttentionInputs(q, k, None, v, cu_seqlens_q, cu_seqlens_k)
    return attend(
        inputs, max_seqlen_q, max_seqlen_k, softmax_scale, causal, out_dtype, backend, batch_invariant=batch_invariant
    )


def flash_attn_varlen_shared_rope(
    q: Float[Tensor, "T N D"],
    k_nope: Float[Tensor, "S N P"],
    k_pe: Float[Tensor, "S R"],
    v: Float[Tensor, "S N Dv"],
    cu_seqlens_q: Int32[Tensor, " offsets"],
    cu_seqlens_k: Int32[Tensor, " offsets"],
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    out_dtype: torch.dtype | None = None,
    *,
    bounded: bool = False,
    return_lse: bool = True,
    out: Float[Tensor, "T N Dv"] | None = None,
    batch_invariant: bool = False,
    backend: BackendChoice = None,
) -> AttentionState | Float[Tensor, "T N Dv"]:
    """Compute `flash_attn_varlen` with keys in two tensors: `k_nope` of each head, and `k_pe` that all heads share.

    The function does not copy `k_pe` for each head.

    Args:
        q: [T, N, P + R], queries.
        k_nope: [S, N, P], part of the keys without rope.
        k_pe: [S, R], rotated part of the keys.
        v: [S, N, Dv], values.
        cu_seqlens_q: [B + 1], prefix sum of the query lengths.
        cu_seqlens_k: [B + 1], prefix sum of the key lengths.
        max_seqlen_q: upper bound of the query lengths; on a GPU the caller guarantees it (`flash_attn_varlen`).
        max_seqlen_k: upper bound of the key lengths; on a GPU the caller guarantees it.
        softmax_scale: factor of the scores.
        causal: if True, each query sees no key after its own position.
        out_dtype: dtype of the output; None means the dtype of `q`.
        bounded: if True, S may be larger than `cu_seqlens_k[-1]`, and the keys after the last request are not read.
        return_lse: whether the kernel stores the LSE.
        out: tensor [T, N, Dv] in `out_dtype`, with any strides, that receives the output; `out` must share no memory
            with the other arguments. None allocates a tensor.
        batch_invariant: if True, the other requests of the call do not change a bit of the result of a request.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Returns:
        With `return_lse`, an `AttentionState`: out [T, N, Dv] and lse [N, T]. Without `return_lse`, the output tensor
        alone. If `out` is given, it is the output tensor.

    Raises:
        TypeError: `bounded`, `return_lse` or `batch_invariant` is not a bool.
        ValueError: for the same reasons as `flash_attn_varlen`, except that `cu_seqlens_k[-1]` may be smaller than S
            with `bounded`. Also if `out` has a wrong shape, dtype or device, or overlaps another argument.
        UnsupportedConfiguration: for the same reasons as `flash_attn_varlen`.
    """
    inputs = AttentionInputs(q, k_nope, k_pe, v, cu_seqlens_q, cu_seqlens_k)
    return attend(
        inputs, max_seqlen_q, max_seqlen_k, softmax_scale, causal, out_dtype, backend, bounded, return_lse, out,
        batch_invariant=batch_invariant,
    )  # fmt: skip


class AttentionInputs(NamedTuple):
    """Queries, keys and values of packed requests, and the offsets of the requests.

    Attributes:
        q: [T, N, D].
        k: [S, N, D], whole keys, if `k_pe` is None. Otherwise [S, N, P], the part of the keys without rope.
        k_pe: [S, R], rotated part of the keys, which all heads share (P + R = D). None if `k` has the whole keys.
        v: [S, N, Dv].
        cu_seqlens_q: [B + 1], prefix sum of the query lengths.
        cu_seqlens_k: [B + 1], prefix sum of the key lengths.
    """

    q: Tensor
    k: Tensor
    k_pe: Tensor | None
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor


def attend(
    inputs: AttentionInputs, max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, causal: bool,
    out_dtype: torch.dtype | None, backend: BackendChoice, bounded: bool = False, return_lse: bool = True,
    out: Float[Tensor, "T N Dv"] | None = None, out_is_checked: bool = False, batch_invariant: bool = False,
) -> AttentionState | Float[Tensor, "T N Dv"]:  # fmt: skip
    """Compute `flash_attn_varlen` or, with `inputs.k_pe`, `flash_attn_varlen_shared_rope`.

    See these functions for the arguments, the results and the errors. `out_is_checked` is True if the caller knows that
    `out` is valid: it has the right shape and dtype, and overlaps no input.
    """
    q = inputs.q
    calls = _ATTENDS if out is None and return_lse is True else _ATTENDS_INTO
    arguments = (*inputs, max_seqlen_q, max_seqlen_k, softmax_scale, causal, batch_invariant)
    signature = calls.signature(*arguments, out_dtype, backend, bounded, return_lse, out)
    chosen = calls.backend_of(signature)
    if chosen is None:
        check_attention(q, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.k_pe)
        check_attention_settings(max_seqlen_q, max_seqlen_k, softmax_scale, causal)
        check_dtype("out_dtype", q.dtype if out_dtype is None else out_dtype)
        check_flag("bounded", bounded)
        check_flag("return_lse", return_lse)
        check_flag("batch_invariant", batch_invariant)
        sizes = None if batch_invariant else _sizes(q, inputs.cu_seqlens_q, max_seqlen_q, max_seqlen_k)
        request = backends.KernelRequest(
            "flash_attn_varlen", q.device, q.dtype, (("qk_head_dim", q.shape[2]), ("v_head_dim", inputs.v.shape[2])),
            query_lens=QueryLenSupport.VARLEN, out_dtype=out_dtype or q.dtype, mask="causal" if causal else None,
            lse=return_lse, batch_invariant=batch_invariant, sizes=sizes, direct=True,
        )  # fmt: skip
        chosen = backends.select(request, backend).name
    if not bounded:
        check_eager_offsets("cu_seqlens_k", inputs.cu_seqlens_k, inputs.k.shape[0])
    out_dtype = out_dtype or q.dtype
    if calls is _ATTENDS:
        return AttentionState(*calls.run(signature, chosen, *arguments, out_dtype))
    out, lse = _targets(inputs, out_dtype, return_lse, out, out_is_checked)
    calls.run(signature, chosen, *arguments, out, lse)
    return out if lse is None else AttentionState(out, lse)


def attend_again(
    kept: KeptCall, inputs: AttentionInputs, max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, causal: bool,
    out_dtype: torch.dtype, return_lse: bool, out: Float[Tensor, "T N Dv"] | None = None, bounded: bool = False,
) -> AttentionState | Float[Tensor, "T N Dv"]:  # fmt: skip
    """Compute `attend` by the kept call of an earlier call with the same signature (`CallsInside.find`)."""
    if not bounded:
        check_eager_offsets("cu_seqlens_k", inputs.cu_seqlens_k, inputs.k.shape[0])
    # `KeptCall` ignores the last argument: the signature has the flag for batch invariance
    arguments = *inputs, max_seqlen_q, max_seqlen_k, softmax_scale, causal, False
    if out is None and return_lse:
        return AttentionState(*kept.again(*arguments, out_dtype, None))
    if out is None and kept.allocates:
        return kept.again(*arguments, None, None, None)[0]
    made, lse = _targets(inputs, out_dtype, return_lse, out, False)
    kept.again(*arguments, made, lse, None)
    if out is not None and not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return made if lse is None else AttentionState(made, lse)


def _targets(inputs: AttentionInputs, out_dtype, return_lse, out, out_is_checked):
    """Return the tensors that receive output and LSE; None in place of an LSE that the caller does not need."""
    q, value = inputs.q, inputs.v.shape[2]
    tokens, heads, _ = q.shape
    if out is None:
        out = q.new_empty(tokens, heads, value, dtype=out_dtype)
    elif not out_is_checked:  # check `out` in every call: which tensors overlap cannot be seen from their shapes
        given = [each for each in inputs if each is not None]
        check_out("out", out, (tokens, heads, value), out_dtype, q.device, *given)
    return out, q.new_empty(heads, tokens, dtype=wide_dtype(out_dtype)) if return_lse else None


def _sizes(q: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, max_seqlen_k: int) -> backends.AttentionSizes | None:
    """Return the sizes of a call; None under torch.compile, whose graph may serve calls of other sizes too."""
    if torch.compiler.is_compiling():
        return None
    return backends.AttentionSizes.rounded(cu_seqlens_q.shape[0] - 1, q.shape[1], max_seqlen_q, max_seqlen_k)


def _check_values(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, tokens: int, keys: int) -> None:
    """Check the values of the offsets of a call with CPU tensors, and the bounds of the lengths."""
    check_offsets("cu_seqlens_q", cu_seqlens_q, tokens)
    check_offsets("cu_seqlens_k", cu_seqlens_k, most=keys)
    check_longest("max_seqlen_q", max_seqlen_q, cu_seqlens_q)
    check_longest("max_seqlen_k", max_seqlen_k, cu_seqlens_k)


def _launch_attention(
    q, k, k_pe, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, batch_invariant,
    out_dtype, backend, out=None, lse=None,
):  # fmt: skip
    if q.device.type == "cpu":
        # If the call is not bounded, `attend` checks that the last offset of the keys is S.
        _check_values(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, q.shape[0], k.shape[0])
    support = backends.support_of(backend, "flash_attn_varlen")
    if k_pe is not None and support.whole_keys:
        k, k_pe = whole_keys(k, k_pe), None
    asked = {"batch_invariant": True} if batch_invariant and support.invariant_on_request else {}
    softmax_scale, (q,) = with_positive_scale(backend, softmax_scale, q)
    state = backends.kernel(backend, "flash_attn_varlen")(
        q, k, k_pe, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, out_dtype,
        *(() if out is None else (out, lse)), **asked,
    )  # fmt: skip
    backends.check_state(
        backend, "flash_attn_varlen", state, (*q.shape[:2], v.shape[2]), out_dtype, q.device,
        out is None or lse is not None, (out, lse),
    )  # fmt: skip
    return state


def _launch_attention_into(
    q, k, k_pe, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, batch_invariant, out,
    lse, backend,
):  # fmt: skip
    _launch_attention(
        q, k, k_pe, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, batch_invariant,
        out.dtype, backend, out, lse,
    )  # fmt: skip


_flash_attn_varlen = torch.library.custom_op(
    "mla_twins::flash_attn_varlen",
    _launch_attention,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor? k_pe, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k,"
    " SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, bool causal, bool batch_invariant,"
    " ScalarType out_dtype, str backend) -> (Tensor, Tensor)",
)


def _kept_attention(*arguments):
    """Return a function for later calls of `_launch_attention` with the same signature; None if there is none."""
    *inputs, out_dtype, backend = arguments
    return _kept(*inputs, out_dtype, None, None, backend)


def _kept_attention_into(
    q, k, k_pe, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, batch_invariant, out,
    lse, backend,
):  # fmt: skip
    return _kept(
        q, k, k_pe, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, batch_invariant,
        out.dtype, out, lse, backend,
    )  # fmt: skip


def _kept(
    q, k, k_pe, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, batch_invariant,
    out_dtype, out, lse, backend,
):  # fmt: skip
    """Return a function that joins the keys if the backend needs whole keys, calls it, and checks what it returns."""
    support, widened, columns = backends.support_of(backend, "flash_attn_varlen"), None, 0
    if (batch_invariant and support.invariant_on_request) or not serves_scale(backend, softmax_scale):
        return None
    splits_keys = k_pe is not None and not support.whole_keys
    if k_pe is not None and support.whole_keys and k_pe.shape[1]:
        widened, columns = Widened(), k.shape[2] + k_pe.shape[1]
        k = k.new_empty(*k.shape[:2], columns)
    call = kept_function(
        backend, "flash_attn_varlen", q, k, k_pe if splits_keys else None, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, softmax_scale, causal, out_dtype, out, lse,
    )  # fmt: skip
    if call is None:
        return None
    on_cpu, into, needs_lse = q.device.type == "cpu", out is not None, out is None or lse is not None
    shape, tokens, keys, device = (*q.shape[:2], v.shape[2]), q.shape[0], k.shape[0], q.device

    def again(q, k, k_pe, v, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, scale, causal, _, *written):
        if on_cpu:
            _check_values(cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, tokens, keys)
        if widened is not None:
            k = widened(k, k_pe, columns)
        out, lse = written[:2] if into else (None, None)
        state = call(
            q, k, k_pe if splits_keys else None, v, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, scale, causal,
            out_dtype, out, lse,
        )  # fmt: skip
        if out is None or type(state) is not tuple or len(state) != 2 or state[0] is not out or state[1] is not lse:
            backends.check_state(backend, "flash_attn_varlen", state, shape, out_dtype, device, needs_lse, (out, lse))
        return state

    again.allocates = into and lse is None and getattr(call, "allocates", False)
    return again


_ATTENDS = backends.CheckedCalls(torch.ops.mla_twins.flash_attn_varlen, _launch_attention, keep=_kept_attention)


@_flash_attn_varlen.register_fake
def _(
    q, k, k_pe, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, batch_invariant,
    out_dtype, backend,
):  # fmt: skip
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2], dtype=out_dtype)
    return out, q.new_empty(q.shape[1], q.shape[0], dtype=wide_dtype(out_dtype))


_flash_attn_varlen_out = torch.library.custom_op(
    "mla_twins::flash_attn_varlen_out",
    _launch_attention_into,
    mutates_args=("out", "lse"),
    schema="(Tensor q, Tensor k, Tensor? k_pe, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k,"
    " SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, bool causal, bool batch_invariant,"
    " Tensor(a!) out, Tensor(b!)? lse, str backend) -> ()",
)
_ATTENDS_INTO = backends.CheckedCalls(
    torch.ops.mla_twins.flash_attn_varlen_out, _launch_attention_into, mutates=(11, 12), keep=_kept_attention_into
)


@_flash_attn_varlen_out.register_fake
def _(
    q, k, k_pe, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, batch_invariant, out,
    lse, backend,
):  # fmt: skip
    return None
