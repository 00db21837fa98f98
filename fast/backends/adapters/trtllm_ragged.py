"""Adapter to TensorRT-LLM's attention of prefills, through FlashInfer (`trtllm_ragged_attention_deepseek`).

Not run: needs Blackwell. The kernels are binaries for GPUs of compute capability 10.x. The tests run FlashInfer's own
Python with a recorder in place of the kernel, so they show what the adapter passes and how it converts the result, but
not what the kernel computes.

The kernel must get no request without queries or without keys. FlashInfer removes such requests if it knows the
lengths on the CPU. So a builder copies the offsets of a step to the CPU once (`fast.mla.flashinfer_hooks`), and a
direct call of `flash_attn_varlen` copies its offsets in each call. Both copies wait for the GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference.interfaces import GraphSupport, check

from ..kernel_request import KernelRequest
from ..own import missing
from ..registry import Backend, OpSupport
from .flashinfer import (
    BASE_2,
    HALF_DTYPES,
    missing_library,
    state_without_keys,
    to_state,
    without_rows,
)
from .flashinfer_workspace import new_workspace
from .ragged_calls import RaggedCall, direct_call

NOT_RUN = "not run: needs Blackwell"
WIDTHS = ((192, 128), (128, 128), (256, 256))  # pairs of head dims (keys, values) that FlashInfer allows


class TrtllmBackend(Backend):
    """A `Backend` that checks pairs of head dims, and says on other GPUs that the kernels were not run."""

    def validate_configuration(self, request: KernelRequest) -> list[str]:
        """Return every reason why the kernels cannot serve `request`."""
        reasons, widths = super().validate_configuration(request), dict(request.head_dims)
        pair = widths.get("qk_head_dim"), widths.get("v_head_dim")
        if None not in pair and pair not in WIDTHS:
            reasons.append(f"{self.name}: serves the columns {WIDTHS} of keys and values, got {pair}")
        return [f"{self.name}: {NOT_RUN}", *reasons] if reasons else []


def missing_entry() -> list[str]:
    """Return what of FlashInfer is missing; an empty list if its entry can be imported."""
    found = missing_library()
    if not found:
        from flashinfer import prefill

        if not hasattr(prefill, "trtllm_ragged_attention_deepseek"):
            found = ["needs a version of flashinfer with trtllm_ragged_attention_deepseek"]
    return found


def attend(
    call: RaggedCall, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, out_dtype: torch.dtype, return_lse: bool,
    out: Tensor | None = None, lse: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Run one call of the kernel, and convert the result to an attention state.

    The kernel gets an output and a workspace of zeros, and an LSE of -inf. It reads the queries as if they were
    contiguous.

    Args:
        call: the lengths of the call; its `state` is the workspace.
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
    from flashinfer.prefill import trtllm_ragged_attention_deepseek

    q_lens, k_lens = call.q_offsets.diff(), call.k_offsets.diff()
    in_place = out is not None and out.dtype == q.dtype and out.is_contiguous()
    made = out.zero_() if in_place else q.new_zeros(*q.shape[:2], v.shape[2])
    base_2_lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32) if return_lse else None
    trtllm_ragged_attention_deepseek(
        query=q.contiguous(),
        key=k[: call.num_keys].contiguous(),
        value=v[: call.num_keys].contiguous(),
        workspace_buffer=call.state.zero_(),
        seq_lens=call.cu_seqlens_k.diff(),
        max_q_len=int(q_lens.max()),
        max_kv_len=int(k_lens.max()),
        bmm1_scale=softmax_scale,
        bmm2_scale=1.0,
        o_sf_scale=1.0,
        batch_size=q_lens.shape[0],
        window_left=-1,
        cum_seq_lens_q=call.cu_seqlens_q,
        cum_seq_lens_kv=call.cu_seqlens_k,
        enable_pdl=False,
        is_causal=call.causal,
        return_lse=return_lse,
        out=made,
        lse=base_2_lse,
        q_seq_lens_cpu=q_lens,
        kv_seq_lens_cpu=k_lens,
    )
    return without_rows(*to_state(made, base_2_lse, BASE_2, out_dtype, out, lse), call.empty_rows)


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
    """Compute attention of packed requests in a direct call, which waits for the GPU and allocates a workspace.

    `fast.backends.adapters.flashinfer.flash_attn_varlen` explains the arguments and the result.
    """
    call = direct_call(q, k, cu_seqlens_q, cu_seqlens_k, causal, new_workspace(q.device))
    return attend(call, q, k, v, softmax_scale, out_dtype, out is None or lse is not None, out, lse)


TRTLLM_RAGGED = TrtllmBackend(
    name="trtllm_ragged",
    priority=0,
    device_type="cuda",
    capability=(10, 0),
    capability_end=(11, 0),
    ops={
        "flash_attn_varlen": OpSupport(
            f"{__name__}:flash_attn_varlen",
            dtypes=HALF_DTYPES,
            out_dtypes=(torch.float32, *HALF_DTYPES),
            head_dims={"qk_head_dim": (128, 192, 256), "v_head_dim": (128, 256)},
            masks=("causal",),
            graph=GraphSupport.NONE,
            batch_invariant=False,
            whole_keys=True,
        )
    },
    missing_package=missing("flashinfer"),
    library="TensorRT-LLM (FlashInfer)",
    install=f"pip install flashinfer-python flashinfer-cubin; {NOT_RUN}",
    missing_artifacts=f"{__name__}:missing_entry",
    only_named=True,
    hooks="fast.mla.flashinfer_hooks:TrtllmRaggedHooks",
)
