"""Adapters to `torch.nn.functional.scaled_dot_product_attention` (SDPA): "torch_flash" and "torch_cudnn".

SDPA is one function over several kernels. "torch_flash" is its flash attention kernel, on a CPU or a GPU. "torch_cudnn"
is its cuDNN kernel, on a GPU. The public function returns no LSE, so both adapters serve prefills without context only.
`torch_sdpa_gqa` has grouped-query attention over packed keys, for which it calls PyTorch's internal ops with an LSE.

SDPA takes requests of equal lengths:

- On a CPU, the adapter calls SDPA once for each request.
- On a GPU, the adapter calls SDPA once for the batch if all requests have the same length and the queries have the same
  offsets as the keys. Otherwise it copies the offsets to the CPU, which waits for the GPU, and calls SDPA once for each
  request. A CUDA graph can therefore not capture these calls.

The kernels differ in what they take:

- The flash attention kernel needs values as wide as the keys. The adapter pads the values with zeros and cuts the
  output.
- The cuDNN kernel takes narrower values, but no request with a single key. The adapter adds a key that no query sees.
- SDPA's causal mask begins at the first key. If a request has more keys than queries, the adapter passes a mask on a
  CPU. The kernels on a GPU take no mask; the adapter adds queries before the first query and drops their output.

On a CPU, PyTorch itself takes the flash attention kernel for these inputs, unless the process has switched this kernel
off. On a GPU, PyTorch chooses among several kernels, so the adapter allows its kernel alone (`OnlyKernel`). This is a
setting of the whole process: while the adapter calls SDPA, the SDPA calls of other threads get this kernel too, or an
error if the kernel cannot serve them. Calls of the adapters in several threads wait for each other. If the kernel
cannot serve a call, PyTorch raises an error and never takes another kernel.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from reference.interfaces import GraphSupport

from ..kernel_request import KernelRequest
from ..registry import Backend, OpSupport
from .conversion import in_words, pad_columns, rows_with_nan

FLASH, CUDNN = "flash", "cudnn"  # names in `OnlyKernel`
LEAST_CUDNN = 91501  # 9.15.1: PyTorch itself avoids older versions, which fail for lengths such as 261
_CHOICE_OF_KERNEL = threading.Lock()  # held while the process-wide setting of the kernel is changed


class OnlyKernel:
    """Context manager that allows one kernel of SDPA on a GPU, and then restores the setting of the process.

    `torch.nn.attention.sdpa_kernel` has the same effect, but takes some 20 to 50 us of Python.

    Args:
        kernel: `FLASH` or `CUDNN`.
    """

    SETTINGS = (  # name of a kernel, function that returns whether it is allowed, function that allows or forbids it
        (FLASH, torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
        (CUDNN, torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
        ("math", torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
        ("efficient", torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    )

    def __init__(self, kernel: str):
        self._kernel = kernel

    def __enter__(self) -> None:
        _CHOICE_OF_KERNEL.acquire()
        self._restore = []
        try:
            for name, is_allowed, allow in self.SETTINGS:
                before, wanted = is_allowed(), name == self._kernel
                if before != wanted:
                    self._restore.append((allow, before))
                    allow(wanted)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            for allow, before in self._restore:
                allow(before)
        finally:
            _CHOICE_OF_KERNEL.release()


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
    lse: None = None,
) -> tuple[Tensor, None]:
    """Compute attention of packed requests with the flash attention kernel, without an LSE.

    Args:
        q: [T, N, D]; on a GPU bfloat16 or float16, D a multiple of 8 and at most 256.
        k: [S, N, D], whole keys.
        k_pe: None, because the declaration asks for whole keys.
        v: [S, N, V], V at most D.
        cu_seqlens_q: [B + 1], first query token of each request.
        cu_seqlens_k: [B + 1], first key of each request.
        max_seqlen_q: upper bound of the query lengths.
        max_seqlen_k: not used.
        softmax_scale: factor of the scores.
        causal: if True, the last query of a request sees all keys, and each earlier query sees one key less than the
            query after it.
        out_dtype: dtype of `q`.
        out: [T, N, V], any strides, written in place; None allocates `out`.
        lse: None, because the declaration says that the kernel returns no LSE.

    Returns:
        out [T, N, V], and None.
    """
    if out is None:
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    if q.device.type == "cuda":
        return _on_gpu(FLASH, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, softmax_scale, causal, out), None
    q_offsets, k_offsets = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    width = q.shape[2] - v.shape[2]
    for request in range(len(q_offsets) - 1):
        rows = slice(q_offsets[request], q_offsets[request + 1])
        keys = slice(k_offsets[request], k_offsets[request + 1])
        queries, seen = rows.stop - rows.start, keys.stop - keys.start
        hidden = max(queries - seen, 0) if causal and seen else (0 if seen else queries)  # rows that see no key
        out[rows.start : rows.start + hidden] = 0
        if hidden == queries:
            continue
        rows = slice(rows.start + hidden, rows.stop)
        mask = None
        if causal and queries - hidden < seen:  # SDPA's own causal mask begins at the first key
            mask = torch.ones(queries, seen, dtype=torch.bool, device=q.device).tril_(seen - queries)
        inputs = [x.transpose(0, 1)[None] for x in (q[rows], k[keys], pad(v[keys], (0, width)))]  # [1, N, tokens, D]
        made = scaled_dot_product_attention(
            *[x if x.stride(-1) == 1 else x.contiguous() for x in inputs], attn_mask=mask,
            is_causal=causal and mask is None, scale=softmax_scale,
        )  # fmt: skip
        # with fewer than 16 keys, the kernel gives 0 to a row whose scores are all NaN, on a CPU with AVX-512
        poisoned = rows_with_nan(q[rows], k[keys], causal)[..., None]
        out[rows] = made[0, :, :, : v.shape[2]].transpose(0, 1).masked_fill(poisoned, torch.nan)
    return out, None


def cudnn_attn_varlen(
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
    lse: None = None,
) -> tuple[Tensor, None]:
    """Compute attention of packed requests with the cuDNN kernel, without an LSE.

    cuDNN compiles a kernel for each new shape, so the first call with a shape takes much longer than later calls.

    Args:
        q: [T, N, D], bfloat16 or float16; D is a multiple of 8 and at most 128, or 192.
        k: [S, N, D], whole keys.
        k_pe: None, because the declaration asks for whole keys.
        v: [S, N, V]; V is a multiple of 8 and at most 128.
        cu_seqlens_q: [B + 1], first query token of each request.
        cu_seqlens_k: [B + 1], first key of each request.
        max_seqlen_q: upper bound of the query lengths.
        max_seqlen_k: not used.
        softmax_scale: factor of the scores.
        causal: if True, the last query of a request sees all keys, and each earlier query sees one key less than the
            query after it.
        out_dtype: dtype of `q`.
        out: [T, N, V], any strides, written in place; None allocates `out`.
        lse: None, because the declaration says that the kernel returns no LSE.

    Returns:
        out [T, N, V], and None.
    """
    if out is None:
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    return _on_gpu(CUDNN, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, softmax_scale, causal, out), None


def _on_gpu(kernel, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, softmax_scale, causal, out):
    """Compute attention of packed requests with one kernel of SDPA, write `out` [T, N, V], and return `out`.

    If all requests have the same length, this function does not wait for the GPU.
    """
    with OnlyKernel(kernel):
        requests = equal_requests(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q)
        if requests:
            if kernel == FLASH:
                v = pad_columns(v, q.shape[2])  # in one launch
            batch = [in_requests(x, requests, max_seqlen_q) for x in (q, k, v)]
            made = attend_equal(*batch, softmax_scale, causal, kernel)
            in_requests(out, requests, max_seqlen_q).copy_(made[..., : out.shape[2]])
            return out
        q_offsets, k_offsets = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()  # waits for the GPU
        for number in range(len(q_offsets) - 1):
            rows = slice(q_offsets[number], q_offsets[number + 1])
            keys = slice(k_offsets[number], k_offsets[number + 1])
            attend_request(out[rows], q[rows], k[keys], v[keys], softmax_scale, causal, kernel)
    return out


def in_requests(x: Tensor, requests: int, length: int) -> Tensor:
    """Return the first `requests * length` tokens of [tokens, N, columns] as a view [requests, length, N, columns]."""
    token, *inner = x.stride()
    return x.as_strided((requests, length, *x.shape[1:]), (length * token, token, *inner))


def equal_requests(q: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int) -> int:
    """Return the number of requests if all queries have `max_seqlen_q` tokens, and the keys have the same offsets.

    The function reads no value on the device. It returns 0 if it cannot be certain, or if there is no query.

    Args:
        q: [T, N, D].
        cu_seqlens_q: [B + 1].
        cu_seqlens_k: [B + 1].
        max_seqlen_q: upper bound of the query lengths.
    """
    requests = cu_seqlens_q.shape[0] - 1
    same = cu_seqlens_q.data_ptr() == cu_seqlens_k.data_ptr() and cu_seqlens_q.shape == cu_seqlens_k.shape
    equal = q.shape[0] == requests * max_seqlen_q > 0
    return requests if same and equal and cu_seqlens_q.is_contiguous() else 0


def columns_of_values(kernel: str, keys: int, values: int) -> int:
    """Return how many columns the values must have: the columns that they have, or more.

    Args:
        kernel: `FLASH` or `CUDNN`.
        keys: columns of the keys.
        values: columns of the values, at most those of the keys.
    """
    if kernel == FLASH:
        return keys
    return 128 if keys == 192 else values  # with keys of 192 columns, cuDNN takes only values of 128 columns


def attend_request(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, kernel: str
) -> None:
    """Compute attention of one request and write `out`.

    Args:
        out: [Sq, N, V].
        q: [Sq, N, D].
        k: [S, N, D].
        v: [S, N, V].
        softmax_scale: factor of the scores.
        causal: whether the mask is causal, aligned bottom-right.
        kernel: `FLASH` or `CUDNN`.
    """
    queries, keys = q.shape[0], k.shape[0]
    hidden = max(queries - keys, 0) if causal and keys else (0 if keys else queries)  # rows that see no key
    out[:hidden] = 0
    seeing = queries - hidden
    if seeing == 0:
        return
    q = q[hidden:]
    if causal and seeing < keys:  # further queries before the first query make both lengths equal
        q = pad(q, (0, 0, 0, 0, keys - seeing, 0))
    made = attend_equal(q[None], k[None], v[None], softmax_scale, causal, kernel)
    out[hidden:] = made[0, -seeing:]


def attend_equal(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, kernel: str) -> Tensor:
    """Compute attention of requests of equal lengths with one call of SDPA.

    Args:
        q: [B, Sq, N, D].
        k: [B, S, N, D]; with `causal`, S must be equal to Sq.
        v: [B, S, N, V].
        softmax_scale: factor of the scores.
        causal: whether the mask is causal.
        kernel: `FLASH` or `CUDNN`.

    Returns:
        [B, Sq, N, V].
    """
    (requests, queries), columns = q.shape[:2], v.shape[3]
    single = kernel == CUDNN and k.shape[1] == 1
    if single:  # each query becomes a request with a second query and a second key; the causal mask hides this key
        rows = q.flatten(0, 1)[:, None], *[x.repeat_interleave(queries, 0) for x in (k, v)]
        q, k, v = (pad(x, (0, 0, 0, 0, 0, 1)) for x in rows)
    if kernel == FLASH:
        q, k, v = in_words(q), in_words(k), in_words(pad_columns(v, columns_of_values(kernel, q.shape[3], columns)))
    else:
        q, k = q.contiguous(), k.contiguous()
        v = pad_columns(v, columns_of_values(kernel, q.shape[3], columns)).contiguous()
    made = scaled_dot_product_attention(
        *[x.transpose(1, 2) for x in (q, k, v)], is_causal=causal or single, scale=softmax_scale
    ).transpose(1, 2)[..., :columns]
    return made[:, :1].unflatten(0, (requests, queries)).flatten(1, 2) if single else made


def missing_flash() -> list[str]:
    """Return what this PyTorch lacks for the flash attention kernel on a GPU; an empty list if it lacks nothing."""
    built = torch.backends.cuda.is_flash_attention_available()
    return [] if built else [f"needs a PyTorch that is built with flash attention for GPUs, found {torch.__version__}"]


def missing_cudnn() -> list[str]:
    """Return what this PyTorch lacks for the cuDNN kernel; an empty list if it lacks nothing."""
    found = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if found is None:
        return [f"needs a PyTorch with cuDNN, found {torch.__version__} without cuDNN"]
    return [] if found >= LEAST_CUDNN else [f"needs cuDNN 9.15.1 or later ({LEAST_CUDNN}), found {found}"]


@dataclass(frozen=True)
class OnTwoDevices(Backend):
    """A backend that serves a second type of device, with other limits than on the first.

    Attributes:
        second: the declaration for the other type of device. It has the same name, and is not registered itself. Both
            declarations have the same launchers.
    """

    second: Backend | None = None

    def validate_configuration(self, request: KernelRequest) -> list[str]:
        """Return every reason why this backend cannot serve `request`; an empty list if it can serve `request`."""
        if self.second is not None and request.device.type == self.second.device_type:
            return self.second.validate_configuration(request)
        return super().validate_configuration(request)

    def missing_for(self, request: KernelRequest) -> tuple[str, ...]:
        """Return what the backend needs on the device of `request` and this machine lacks."""
        if self.second is not None and request.device.type == self.second.device_type:
            return self.second.missing_for(request)
        return super().missing_for(request)

    def supports_compute_capability(self, capability: tuple[int, int]) -> bool:
        """Return whether the kernels run on NVIDIA GPUs of a compute capability, given as (major, minor)."""
        backends = [super(), *([] if self.second is None else [self.second])]
        return any(each.supports_compute_capability(capability) for each in backends)

    def supports_dtype(self, op: str, dtype: torch.dtype) -> bool:
        """Return whether the backend declares an op for queries and keys of a dtype on one of the two devices."""
        return super().supports_dtype(op, dtype) or (self.second is not None and self.second.supports_dtype(op, dtype))


def _support(launcher: str, kept: str, **declared) -> dict[str, OpSupport]:
    return {
        "flash_attn_varlen": OpSupport(
            f"{__name__}:{launcher}", kept_call=f"{__name__}_calls:{kept}", same_out_dtype=True, whole_keys=True,
            masks=("causal",), lse=False, **declared,
        )
    }  # fmt: skip


def _gqa_support(launcher: str, **declared) -> dict[str, OpSupport]:
    return {
        "gqa_varlen_attention": OpSupport(
            f"fast.backends.adapters.torch_sdpa_gqa:{launcher}",
            masks=("causal",),
            features=("sinks",),
            out_dtypes=(torch.bfloat16, torch.float16, torch.float32),
            only_named=True,
            **declared,
        )
    }


_OF_SDPA = dict(priority=-10, library="PyTorch", only_named=True)
_ON_GPU = dict(
    dtypes=(torch.bfloat16, torch.float16),
    graph=GraphSupport.NONE,
    batch_invariant=False,  # the kernels choose their tiles and splits for the whole batch
)
TORCH_FLASH = OnTwoDevices(
    name="torch_flash",
    device_type="cpu",
    ops={
        **_support("flash_attn_varlen", "kept_flash", narrow_values=True),
        **_gqa_support(
            "flash_varlen_attention", dtypes=(torch.bfloat16, torch.float16, torch.float32), graph=GraphSupport.NONE
        ),
    },
    second=Backend(
        name="torch_flash",
        device_type="cuda",
        capability=(8, 0),
        ops={
            **_support(
                "flash_attn_varlen",
                "kept_flash",
                narrow_values=True,
                head_dims={"qk_head_dim": tuple(range(8, 257, 8))},
                **_ON_GPU,
            ),
            **_gqa_support("flash_varlen_attention", head_dims={"head_dim": tuple(range(8, 257, 8))}, **_ON_GPU),
        },
        missing_artifacts=f"{__name__}:missing_flash",
        **_OF_SDPA,
    ),
    **_OF_SDPA,
)
TORCH_CUDNN = Backend(
    name="torch_cudnn",
    device_type="cuda",
    capability=(9, 0),
    capability_end=(11, 0),
    ops={
        **_support(
            "cudnn_attn_varlen",
            "kept_cudnn",
            head_dims={"qk_head_dim": (*range(8, 129, 8), 192), "v_head_dim": tuple(range(8, 129, 8))},
            **_ON_GPU,
        ),
        **_gqa_support("cudnn_varlen_attention", head_dims={"head_dim": tuple(range(8, 129, 8))}, **_ON_GPU),
    },
    missing_artifacts=f"{__name__}:missing_cudnn",
    **_OF_SDPA,
)
