"""Adapter to FlashInfer's decode for MLA (`BatchMLAPagedAttentionWrapper`): one query token of each request.

The wrapper returns an LSE since it has the argument `lse_mode` (FlashInfer 0.7.2 has it). The adapter refuses older
versions, because the layer's merges need the LSE.

FlashInfer plans a decode before it runs the decode, from lengths on the CPU. There are two ways to a planned decode:

- Steps of a builder (`fast.mla.flashinfer_hooks`): the builder copies the lengths of a step to the CPU, which waits for
  the GPU. The first layer plans the decode, and the other layers use the same plan. The layers of one builder must run
  on one stream.
- Direct calls of `mla_decode`: each call waits for the GPU and plans again. This is slow. The direct calls on a device
  share a workspace, which the process keeps.

Limits:

- FlashInfer refuses some lengths if a request has several query tokens and the number of heads does not divide 64 or
  128. The declaration therefore has one query token of each request, for which no such limit exists.
- A row whose query is NaN has output 0 and LSE -inf: the kernel takes the row for a row without keys.
- A plan is made on the CPU, so no CUDA graph can capture a decode.

By its sources, the kernel "fa3" loads no entry after the last token of a request: it fills these entries with zeros.
"""

from __future__ import annotations

import functools
import inspect
import threading

import torch
from torch import Tensor

from reference.interfaces import (
    COMPUTE_FORMAT,
    CONVERTED,
    CacheFormat,
    DecodeMetadata,
    GraphSupport,
    InvariantSplitRule,
    QueryLenSupport,
)

from ..error_texts import in_one_line
from ..kernel_request import KernelRequest
from ..own import missing
from ..registry import Backend, changed
from .conversion import in_words, lawful_state
from .flash_attn import HALF, POISONED, STATE_DTYPES, decode_ops
from .flashinfer import kernel_of, missing_library
from .flashinfer_workspace import new_workspace, too_small_workspace

LATENT, ROPE = 512, 64


def missing_decode() -> list[str]:
    """Return why FlashInfer's decode for MLA cannot be used; an empty list if it can be used."""
    reasons = missing_library()
    if reasons:
        return reasons
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    if "lse_mode" not in inspect.signature(BatchMLAPagedAttentionWrapper.plan).parameters:
        return ["FlashInfer is too old: BatchMLAPagedAttentionWrapper.plan has no parameter lse_mode"]
    return []


def _module(dtype: torch.dtype, kernel: str):
    """Return FlashInfer's description of a compiled module; make its source files, but do not compile them."""
    from flashinfer.jit.attention.modules import gen_batch_mla_module

    return gen_batch_mla_module(kernel, dtype, dtype, dtype, torch.int32, LATENT, ROPE, False)  # without a profiler


_COMPILED: set[tuple] = set()  # arguments of `_module` whose module was found


def is_compiled(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the kernel for a dtype is compiled."""
    key = dtype, kernel_of(device)
    if key not in _COMPILED and _module(*key).is_compiled:
        _COMPILED.add(key)
    return key in _COMPILED


def compile_kernel(dtype: torch.dtype, device: torch.device) -> None:
    """Let FlashInfer compile the kernel for a dtype, which needs nvcc and takes minutes."""
    _module(dtype, kernel_of(device)).build_and_load()
    changed()


class FlashInferMLABackend(Backend):
    """A `Backend` that also checks whether the kernel is compiled."""

    def validate_configuration(self, request: KernelRequest) -> list[str]:
        """Return every reason why FlashInfer cannot serve `request`."""
        reasons = super().validate_configuration(request)
        if reasons or request.op != "mla_decode" or request.dtype is None:
            return reasons
        return [f"{self.name}: {reason}" for reason in _not_compiled(request)]

    def missing_for(self, request: KernelRequest) -> tuple[str, ...]:
        """Return what of FlashInfer is missing for `request`: the library, or else the compiled kernel."""
        found, support = self.missing(), self.ops.get(request.op)
        if found or request.device.type != self.device_type or support is None or request.op != "mla_decode":
            return found
        return tuple(_not_compiled(request)) if support.supports_dtype(request.dtype) else ()


def _not_compiled(request: KernelRequest) -> list[str]:
    """Return why the kernel for `request` is not ready; an empty list if it is compiled."""
    try:
        compiled = is_compiled(request.dtype, request.device)
    except Exception as error:  # such as an old FlashInfer
        return [f"cannot look for its compiled kernel: {in_one_line(error)}"]
    if compiled:
        return []
    return [f"has no compiled kernel for {request.dtype} (install flashinfer-jit-cache, or call "
            "fast.backends.adapters.flashinfer_mla.compile_kernel)"]  # fmt: skip


class DecodeLengths:
    """The lengths of the decodes of one step, on the CPU, and the pages of their requests.

    Args:
        seq_lens: [B], keys of each request.
        block_table: [B, W].
        block_size: number of tokens in a block.

    Attributes:
        seq_lens: [B], int32 on the CPU.
        page_offsets: [B + 1], int32 on the CPU, first page of each request in `pages`.
        pages: int32 on the device, the block numbers of all requests.
    """

    def __init__(self, seq_lens: Tensor, block_table: Tensor, block_size: int):
        self.seq_lens = seq_lens.cpu()
        counts = (self.seq_lens + (block_size - 1)) // block_size
        ends = counts.cumsum(0)
        self.page_offsets = torch.nn.functional.pad(ends, (1, 0)).int()
        # place of each page in the block table: its column plus W times its request
        first = torch.arange(counts.shape[0], device="cpu") * block_table.shape[1] - (ends - counts)
        places = first.repeat_interleave(counts) + torch.arange(int(self.page_offsets[-1]), device="cpu")
        self.pages = block_table.flatten()[places.to(block_table.device)]


class DecodeWrapper:
    """A wrapper of FlashInfer, with the step for which it is planned.

    FlashInfer's plan is a copy from pinned memory to the GPU. A new plan frees this memory, so the wrapper first waits
    for the copy of its last plan.

    Args:
        workspace: uint8, memory for partial outputs.
    """

    def __init__(self, workspace: Tensor):
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        self._library = BatchMLAPagedAttentionWrapper(workspace, backend=kernel_of(workspace.device))
        self._planned: tuple | None = None  # the lengths and the properties for which the wrapper is planned
        self._used, self._workspace = torch.cuda.Event(), workspace

    def run(
        self, lengths: DecodeLengths, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, softmax_scale: float,
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Decode, and plan the decode before if the wrapper is planned for something else.

        Args:
            lengths: lengths of the step.
            ql_nope: [B, N, 512].
            q_pe: [B, N, 64].
            kv_cache: [num_blocks, block_size, 576].
            softmax_scale: factor of the scores.
            out: contiguous [B, N, 512] in the dtype of `ql_nope`, written in place; None allocates a tensor.

        Returns:
            out [B, N, 512], and natural-log LSE [B, N].
        """
        wanted = lengths, ql_nope.shape[1], kv_cache.shape[1], ql_nope.dtype, softmax_scale
        if wanted != self._planned:
            self._plan(*wanted)
        if out is None:  # FlashInfer would allocate an output with the strides of `ql_nope`
            out = ql_nope.new_empty(ql_nope.shape)
        return self._library.run(
            query=(in_words(ql_nope), in_words(q_pe)), kv_cache=(kv_cache[..., :LATENT], kv_cache[..., LATENT:]),
            out=out, return_lse=True, return_lse_base_on_e=True,
        )  # fmt: skip

    def _plan(
        self, lengths: DecodeLengths, heads: int, block_size: int, dtype: torch.dtype, softmax_scale: float
    ) -> None:
        from flashinfer.mla import MLAPlanMetadata

        self._planned = None
        self._used.synchronize()
        rows = torch.arange(lengths.seq_lens.shape[0] + 1, dtype=torch.int32, device="cpu")
        with too_small_workspace(self._workspace):
            self._library.plan(
                metadata=MLAPlanMetadata.csr(rows, lengths.page_offsets, lengths.pages, lengths.seq_lens),
                num_heads=heads, head_dim_ckv=LATENT, head_dim_kpe=ROPE, page_size=block_size, causal=False,
                sm_scale=softmax_scale, q_data_type=dtype, kv_data_type=dtype, query_layout="split",
                kv_cache_layout="split", lse_mode="basee",
            )  # fmt: skip
        self.mark_used()
        self._planned = lengths, heads, block_size, dtype, softmax_scale

    def mark_used(self) -> None:
        """Let the next plan wait for everything that the current stream has been given so far."""
        self._used.record(torch.cuda.current_stream(self._workspace.device))


@functools.cache
def _direct_wrapper(device: torch.device) -> tuple[DecodeWrapper, threading.Lock]:
    """Return the wrapper for the direct calls on a device, and a lock that its user holds."""
    return DecodeWrapper(new_workspace(device)), threading.Lock()


def mla_decode(
    ql_nope: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    visible_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    softmax_scale: float,
    out_dtype: torch.dtype,
    tile_ranges: Tensor | None = None,
    split_offsets: Tensor | None = None,
    batch_invariant: bool = False,
    split_rule: InvariantSplitRule | None = None,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    kv_scale: Tensor | None = None,
    out: Tensor | None = None,
    *,
    fp8_mode: str = CONVERTED,
    q_scale: Tensor | None = None,
    prepared: tuple[Tensor, ...] = (),
) -> tuple[Tensor, Tensor]:
    """Compute absorbed attention of one query token of each request over its cached latents.

    Args:
        ql_nope: [B, N, 512], absorbed queries; bfloat16 or float16.
        q_pe: [B, N, 64], rope part of the queries.
        kv_cache: [num_blocks, block_size, 576] in the dtype of the queries.
        block_table: [B, W].
        seq_lens: [B], keys of each request.
        query_start_loc: not used, because each request has one query token.
        visible_lens: not used, because each query token sees all keys of its request.
        max_query_len: not used.
        max_seq_len: not used.
        softmax_scale: factor of the scores.
        out_dtype: dtype of the output.
        tile_ranges: not used, because the library makes its own schedule.
        split_offsets: not used.
        batch_invariant: False, because the declaration excludes True.
        split_rule: not used.
        cache_format: `compute_dtype`.
        kv_scale: None, because the format has no scale.
        out: [B, N, 512] in `out_dtype`, contiguous, written in place; None allocates a tensor.
        fp8_mode: "converted".
        q_scale: None.
        prepared: the tensor of `prepare`, which leads to the plan of the step. Empty: this call plans the decode.

    Returns:
        out [B, N, 512] and lse [N, B], natural log, float32. Rows without keys: output 0 and LSE -inf.
    """
    tokens, heads, _ = ql_nope.shape
    if tokens == 0 or heads == 0 or kv_cache.shape[0] == 0:
        out = ql_nope.new_empty(ql_nope.shape, dtype=out_dtype) if out is None else out
        return out.zero_(), torch.full((heads, tokens), -torch.inf, dtype=torch.float32, device=ql_nope.device)
    target = out if out is not None and out.dtype == ql_nope.dtype else None
    planned = getattr(prepared[0], "planned_decode", None) if prepared else None
    if planned is not None:
        wrapper, lengths = planned
        made, made_lse = wrapper.run(lengths, ql_nope, q_pe, kv_cache, softmax_scale, target)
    else:
        wrapper, lock = _direct_wrapper(ql_nope.device)
        with lock:
            lengths = DecodeLengths(seq_lens, block_table, kv_cache.shape[1])
            made, made_lse = wrapper.run(lengths, ql_nope, q_pe, kv_cache, softmax_scale, target)
            wrapper.mark_used()  # the next direct call may come from another stream
    return lawful_state(made, made_lse.T, POISONED, out_dtype, LATENT, out)


def prepare(decode: DecodeMetadata, wrapper: DecodeWrapper) -> tuple[Tensor]:
    """Return an empty tensor whose attribute `planned_decode` has the wrapper and the lengths of a step.

    The plan of a step passes tensors alone to a decode (`DecodeMetadata.prepared`). The first layer of the step plans
    the decode, because only a layer knows the softmax scale and the dtype. A graph of `torch.compile` may replace the
    tensor by another tensor without the attribute; each decode then plans anew.

    Args:
        decode: decode part of the plan, with at least one request.
        wrapper: the wrapper of the builder.
    """
    found = torch.empty(0, device="cpu")
    found.planned_decode = wrapper, DecodeLengths(decode.seq_lens, decode.block_table, decode.block_size)
    return (found,)


_OPS = decode_ops(
    f"{__name__}:mla_decode",
    dtypes=HALF,
    out_dtypes=STATE_DTYPES,
    cache_formats=(COMPUTE_FORMAT.name,),
    fp8_modes=(CONVERTED,),
    head_dims={"kv_lora_rank": (LATENT,), "qk_rope_head_dim": (ROPE,)},
    block_sizes=(16, 32, 64, 128),
    batch_invariant=False,  # the splits of a request depend on the lengths of all requests
    query_lens=QueryLenSupport.SINGLE_ONLY,
    graph=GraphSupport.NONE,
    needs_words=True,
    plans_steps=True,
)

FLASHINFER_MLA = FlashInferMLABackend(
    name="flashinfer_mla",
    priority=-100,
    device_type="cuda",
    ops=_OPS,
    capability=(8, 0),
    missing_package=missing("flashinfer"),
    library="FlashInfer",
    install="pip install flashinfer-python",
    missing_artifacts=f"{__name__}:missing_decode",
    hooks="fast.mla.flashinfer_hooks:FlashInferMLAHooks",
)
