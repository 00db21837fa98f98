"""Adapter to FlashInfer: attention of prefills over packed keys (`BatchPrefillWithRaggedKVCacheWrapper`).

`flashinfer_gqa` has grouped-query attention over a paged cache.

FlashInfer plans a call before it runs the call: it assigns row blocks to programs, from lengths on the CPU. There are
two ways to a planned call:

- Steps of a builder (`fast.mla.flashinfer_hooks`): the builder copies all offsets of a step to the CPU in one copy,
  which waits for the GPU. The first layer plans each call of the step, and the other layers use the same plan. The
  layers of one builder must run on one stream.
- Direct calls of `flash_attn_varlen`: each call waits for the GPU and plans again. This is slow. The direct calls on a
  device share a workspace, which the process keeps.

The adapter names FlashInfer's kernel itself: "fa3" on GPUs of compute capability 9.x, and "fa2" on other GPUs. Two
limits come from these kernels:

- "fa3" loads whole tiles of values. A tile may contain the first values of the next request in the batch, whose
  weights are 0. If such a value is NaN or infinite, rows of the request before it become NaN too. Keys have no such
  effect, and values after the last request are not read.
- "fa3" is batch-invariant. "fa2" is not: the height of its row blocks depends on the mean query length of the batch.

FlashInfer compiles a kernel when the kernel is first needed, which takes minutes. The adapter serves only calls whose
kernel is compiled already: by the package flashinfer-jit-cache, by an earlier program, or by `compile_kernel`.
"""

from __future__ import annotations

import functools
import threading

import torch
from torch import Tensor

from reference.interfaces import GraphSupport, check

from ..error_texts import in_one_line
from ..kernel_request import KernelRequest
from ..own import missing
from ..registry import Backend, OpSupport, changed
from .conversion import Convention, in_words, lawful_state
from .flashinfer_workspace import new_workspace, too_small_workspace
from .ragged_calls import RaggedCall, direct_call

BASE_2, NATURAL = Convention(base_2=True), Convention()
HALF_DTYPES = (torch.bfloat16, torch.float16)
EQUAL_WIDTHS = (64, 128, 256)  # head dims that keys and values may share; the only other pair is (192, 128)


def missing_library() -> list[str]:
    """Return why FlashInfer cannot be imported; an empty list if it can be imported."""
    try:
        import flashinfer  # noqa: F401
    except (Exception, SystemExit) as error:  # the import of a library may raise any error
        return [f"cannot import flashinfer: {in_one_line(error)}"]
    return []


def kernel_of(device: torch.device) -> str:
    """Return the name of the FlashInfer kernel that serves a GPU."""
    return "fa3" if torch.cuda.get_device_capability(device)[0] == 9 else "fa2"


def _module(
    dtype: torch.dtype, qk_head_dim: int, v_head_dim: int, kernel: str, window: bool = False, soft_cap: bool = False
):
    """Return FlashInfer's description of a compiled module; make its source files, but do not compile them."""
    from flashinfer.jit.attention import modules

    make = modules.gen_batch_prefill_module
    if kernel == "fa2":  # newer versions of FlashInfer use another module for fa2
        make = getattr(modules, "_gen_batch_prefill_primary_module", make)
    # the last four arguments: no rotation, window, soft cap, products accumulated in float32
    return make(kernel, dtype, dtype, dtype, torch.int32, qk_head_dim, v_head_dim, 0, window, soft_cap, False)


_COMPILED: set[tuple] = set()  # arguments of `_module` whose module was found


def is_compiled(
    dtype: torch.dtype, qk_head_dim: int, v_head_dim: int, device: torch.device, window: bool = False,
    soft_cap: bool = False,
) -> bool:  # fmt: skip
    """Return whether the kernel for a dtype and two head dims is compiled, with or without a window and a soft cap."""
    key = dtype, qk_head_dim, v_head_dim, kernel_of(device), window, soft_cap
    if key not in _COMPILED and _module(*key).is_compiled:
        _COMPILED.add(key)
    return key in _COMPILED


def compile_kernel(
    dtype: torch.dtype, qk_head_dim: int, v_head_dim: int, device: torch.device, window: bool = False,
    soft_cap: bool = False,
) -> None:  # fmt: skip
    """Let FlashInfer compile the kernel for a dtype and two head dims; this needs nvcc and takes minutes.

    Later calls choose their backend again. Grouped-query attention with a window, with a soft cap or with both has
    kernels of its own.
    """
    _module(dtype, qk_head_dim, v_head_dim, kernel_of(device), window, soft_cap).build_and_load()
    changed()


class FlashInferBackend(Backend):
    """A `Backend` that also checks pairs of head dims, batch invariance, and whether the kernel is compiled."""

    def validate_configuration(self, request: KernelRequest) -> list[str]:
        """Return every reason why FlashInfer cannot serve `request`."""
        reasons, widths = super().validate_configuration(request), dict(request.head_dims)
        head_dim = widths.get("head_dim")  # of grouped-query attention
        keys, values = widths.get("qk_head_dim", head_dim), widths.get("v_head_dim", head_dim)
        if reasons or keys is None or values is None or request.dtype is None:
            return reasons
        if (keys, values) != (192, 128) and keys != values:
            return [f"{self.name}: serves keys as wide as values, or 192 and 128 columns, got {keys} and {values}"]
        if request.batch_invariant and kernel_of(request.device) != "fa3":
            reasons.append("is not batch-invariant on this GPU")
        return [f"{self.name}: {reason}" for reason in [*reasons, *self._not_compiled(request, keys, values)]]

    def missing_for(self, request: KernelRequest) -> tuple[str, ...]:
        """Return what of FlashInfer is missing for `request`: the library, or else the compiled kernel."""
        found, widths = self.missing(), dict(request.head_dims)
        head_dim, support = widths.get("head_dim"), self.ops.get(request.op)
        keys, values = widths.get("qk_head_dim", head_dim), widths.get("v_head_dim", head_dim)
        exists = (keys, values) == (192, 128) or (keys == values and keys in EQUAL_WIDTHS)
        if found or support is None or not exists or not support.supports_dtype(request.dtype):
            return found
        if request.device.type != self.device_type:
            return ()
        return tuple(self._not_compiled(request, keys, values))

    def _not_compiled(self, request: KernelRequest, keys: int, values: int) -> list[str]:
        """Return why the kernel for `request`, with these head dims, is not ready; an empty list if it is compiled."""
        needed = {"a window": "window" in request.features, "a soft cap": "soft_cap" in request.features}
        try:
            compiled = is_compiled(request.dtype, keys, values, request.device, *needed.values())
        except Exception as error:  # such as an old FlashInfer
            return [f"cannot look for its compiled kernel: {in_one_line(error)}"]
        if compiled:
            return []
        return [
            f"has no compiled kernel for {request.dtype} with {keys} and {values} columns"
            f"{''.join(f', with {name}' for name, is_needed in needed.items() if is_needed)} (install "
            "flashinfer-jit-cache, or call fast.backends.adapters.flashinfer.compile_kernel)"
        ]


class RaggedWrapper:
    """A wrapper of FlashInfer, with the call for which it is planned.

    FlashInfer's plan is a copy from the pinned memory of the wrapper to the GPU. A new plan overwrites this memory, so
    the wrapper first waits for the copy of its last plan.

    Args:
        workspace: uint8, memory for partial outputs; wrappers that run one after the other may share it.
    """

    def __init__(self, workspace: Tensor):
        import flashinfer

        kernel = kernel_of(workspace.device)
        self._library = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=kernel)
        self._planned: tuple | None = None  # the call and the properties for which the wrapper is planned
        self._used, self._workspace = torch.cuda.Event(), workspace

    def run(
        self, call: RaggedCall, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, out: Tensor | None,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor] | Tensor:  # fmt: skip
        """Run a call, and plan it before if the wrapper is planned for something else.

        Args:
            call: the lengths of the call.
            q: [T, N, D].
            k: [S, N, D].
            v: [S, N, V].
            softmax_scale: factor of the scores.
            out: contiguous [T, N, V] in the dtype of `q`, written in place; None allocates a tensor.
            return_lse: whether the kernel stores the LSE.

        Returns:
            out [T, N, V]; with `return_lse` also the LSE in base 2, [T, N].
        """
        wanted = call, q.shape[1], q.shape[2], v.shape[2], q.dtype, softmax_scale
        if wanted != self._planned:
            self._planned = None
            self._used.synchronize()
            with too_small_workspace(self._workspace):
                self._library.plan(
                    call.q_offsets, call.k_offsets, q.shape[1], q.shape[1], q.shape[2], v.shape[2], causal=call.causal,
                    sm_scale=softmax_scale, q_data_type=q.dtype, kv_data_type=q.dtype,
                )  # fmt: skip
            self.mark_used()
            self._planned = wanted
        return self._library.run(q, k, v, out=out, return_lse=return_lse)

    def mark_used(self) -> None:
        """Let the next plan wait for everything that the current stream has been given so far."""
        self._used.record(torch.cuda.current_stream(self._workspace.device))


class RaggedWrappers:
    """The workspace and the wrappers of one builder, which later steps use again.

    Args:
        device: device of the plans.
        workspace: size of the workspace in bytes, or the workspace; None takes the size from the environment.
    """

    def __init__(self, device: torch.device, workspace: int | Tensor | None = None):
        self.workspace = new_workspace(device, workspace)
        self._wrappers: list[RaggedWrapper] = []

    def wrapper(self, number: int) -> RaggedWrapper:
        """Return the wrapper of a step's call with this number; the list of wrappers grows with the calls of a step."""
        while len(self._wrappers) <= number:
            self._wrappers.append(RaggedWrapper(self.workspace))
        return self._wrappers[number]


def to_state(
    made: Tensor, lse_by_token: Tensor | None, convention: Convention, out_dtype: torch.dtype, out: Tensor | None,
    lse: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Convert what a library returned to the layout of an `AttentionState`.

    Args:
        made: [T, N, V], output of the library.
        lse_by_token: [T, N], LSE of the library; None without an LSE.
        convention: how the LSE differs from the state law.
        out_dtype: dtype of the output.
        out: [T, N, V], written in place; None allocates a tensor if the dtype of `made` is another dtype.
        lse: [N, T], float32, written in place; None allocates a tensor.

    Returns:
        out [T, N, V] in `out_dtype`, and lse [N, T] or None.
    """
    by_head = None if lse_by_token is None else lse_by_token.T
    return lawful_state(made, by_head, convention, out_dtype, made.shape[2], out, lse)


def state_without_keys(
    q: Tensor, v: Tensor, out_dtype: torch.dtype, return_lse: bool, out: Tensor | None, lse: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the attention state of a call that has no query or no key: output 0 and LSE -inf.

    The arguments are those of `to_state` and `attend`.
    """
    out = q.new_empty(*q.shape[:2], v.shape[2], dtype=out_dtype) if out is None else out
    if return_lse and lse is None:
        lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    return out.zero_(), lse.fill_(-torch.inf) if return_lse else None


def without_rows(out: Tensor, lse: Tensor | None, rows: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Write output 0 and LSE -inf for the query tokens that attend no key; do nothing if `rows` is None.

    Args:
        out: [T, N, V].
        lse: [N, T], or None.
        rows: int64, indices of these query tokens.
    """
    if rows is not None:
        out.index_fill_(0, rows, 0.0)
        if lse is not None:
            lse.index_fill_(1, rows, -torch.inf)
    return out, lse


def attend(
    call: RaggedCall, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, out_dtype: torch.dtype, return_lse: bool,
    out: Tensor | None = None, lse: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Run one call of FlashInfer's attention, and convert the result to an attention state.

    Args:
        call: the lengths of the call; its `state` is a `RaggedWrapper`.
        q: [T, N, D].
        k: [S, N, D]; the rows after the keys of the last request are not read.
        v: [S, N, V].
        softmax_scale: factor of the scores.
        out_dtype: dtype of the output.
        return_lse: whether the kernel stores the LSE.
        out: [T, N, V] in `out_dtype`, any strides, written in place; None allocates a tensor.
        lse: [N, T], float32, written in place; None allocates a tensor.

    Returns:
        out [T, N, V], and lse [N, T] or None.
    """
    if call.num_queries == 0 or call.num_keys == 0:
        return state_without_keys(q, v, out_dtype, return_lse, out, lse)
    check(k.shape[0] >= call.num_keys, "k", f"at least {call.num_keys} keys", k.shape[0])
    keys, values = in_words(k), in_words(v)
    if k.shape[0] > call.num_keys:
        keys, values = keys[: call.num_keys], values[: call.num_keys]
    target = out if out is not None and out.dtype == q.dtype and out.is_contiguous() else None
    made = call.state.run(call, in_words(q), keys, values, softmax_scale, target, return_lse)
    made, base_2_lse = made if return_lse else (made, None)
    state = to_state(made, base_2_lse, BASE_2, out_dtype, out, lse)
    return without_rows(*state, call.empty_rows)


def attend_seeing_rows(
    call: RaggedCall, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, out_dtype: torch.dtype, return_lse: bool,
    out: Tensor | None = None, lse: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Run `attend` for the queries that see a key under a causal mask; the other rows get output 0 and LSE -inf.

    If a request had fewer keys than queries, FlashInfer 0.7.2 wrote the LSE -inf also into some rows that see keys.
    """
    q_ends, seen = call.q_offsets[1:], torch.minimum(call.q_offsets.diff(), call.k_offsets.diff())
    rows = [torch.arange(end - count, end) for end, count in zip(q_ends.tolist(), seen.tolist(), strict=True)]
    rows = torch.cat(rows).to(q.device)
    starts = torch.nn.functional.pad(seen.cumsum(0, dtype=torch.int32), (1, 0))
    part = RaggedCall(starts, call.k_offsets, starts.to(q.device), call.cu_seqlens_k, True, call.state)
    made, made_lse = attend(part, q[rows], k, v, softmax_scale, out_dtype, return_lse)
    out, lse = state_without_keys(q, v, out_dtype, return_lse, out, lse)
    out.index_copy_(0, rows, made)
    return out, lse if made_lse is None else lse.index_copy_(1, rows, made_lse)


@functools.cache
def _direct_wrapper(device: torch.device) -> tuple[RaggedWrapper, threading.Lock]:
    """Return the wrapper for the direct calls on a device, and a lock that its user holds."""
    return RaggedWrappers(device).wrapper(0), threading.Lock()


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
    """Compute attention of packed requests in a direct call, which waits for the GPU and plans anew.

    Args:
        q: [T, N, D].
        k: [S, N, D], whole keys.
        k_pe: None, because the declaration asks for whole keys.
        v: [S, N, V].
        cu_seqlens_q: [B + 1], first query token of each request.
        cu_seqlens_k: [B + 1], first key of each request; keys after the last request are not read.
        max_seqlen_q: not used.
        max_seqlen_k: not used.
        softmax_scale: factor of the scores.
        causal: if True, the last query of a request sees all keys, and each earlier query sees one key less than the
            query after it.
        out_dtype: dtype of the output.
        out: [T, N, V], any strides, written in place; None allocates `out` and the LSE.
        lse: [N, T], float32, written in place; None for a call with `out` and without an LSE.

    Returns:
        out [T, N, V], and lse [N, T] or None.
    """
    wrapper, lock = _direct_wrapper(q.device)
    with lock:
        call = direct_call(q, k, cu_seqlens_q, cu_seqlens_k, causal, wrapper)
        run = attend if not causal or call.empty_rows is None else attend_seeing_rows
        state = run(call, q, k, v, softmax_scale, out_dtype, out is None or lse is not None, out, lse)
        wrapper.mark_used()  # the next direct call may come from another stream
    return state


FLASHINFER = FlashInferBackend(
    name="flashinfer",
    priority=0,
    device_type="cuda",
    capability=(8, 0),
    ops={
        "flash_attn_varlen": OpSupport(
            f"{__name__}:flash_attn_varlen",
            dtypes=HALF_DTYPES,
            out_dtypes=(torch.float32, *HALF_DTYPES),
            head_dims={"qk_head_dim": (*EQUAL_WIDTHS, 192), "v_head_dim": EQUAL_WIDTHS},
            masks=("causal",),
            graph=GraphSupport.NONE,
            whole_keys=True,
            mixes_nan=True,
            plans_steps=True,
            family_priorities={"9.x": 12},  # "fa2" was not measured against the kernels of this package
        ),
        "gqa_paged_attention": OpSupport(
            "fast.backends.adapters.flashinfer_gqa:gqa_paged_attention",
            dtypes=HALF_DTYPES,
            out_dtypes=(torch.float32, *HALF_DTYPES),
            head_dims={"head_dim": EQUAL_WIDTHS},
            block_sizes=tuple(range(16, 1025, 16)),
            batch_invariant=False,  # the splits of "fa2" depend on the other requests; "fa3" was not tested
            masks=("causal",),
            graph=GraphSupport.NONE,
            only_named=True,
            features=("sinks", "soft_cap", "window"),
            cache_reasons="fast.backends.adapters.flashinfer_gqa:cache_reasons",
        ),
    },
    missing_package=missing("flashinfer"),
    library="FlashInfer",
    install="pip install flashinfer-python",
    missing_artifacts=f"{__name__}:missing_library",
    hooks="fast.mla.flashinfer_hooks:FlashInferHooks",
)
