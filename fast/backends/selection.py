"""Which backend serves a request: what each declares, the choice among them, and what `explain` says of it."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from reference.interfaces import (
    FLOAT_DTYPES,
    MLAConfig,
    QueryLenSupport,
    UnsupportedConfiguration,
    check,
    check_config,
    check_device,
    check_flag,
    check_int,
    check_type,
)

from ..kernels import cpu

BackendChoice = str | Mapping[str, str] | None  # of every `backend=`: a name, op to name, or None; see above


@dataclass(frozen=True)
class KernelRequest:
    """What a call needs of a kernel.

    Attributes:
        op: name of the op, such as "mla_decode".
        device: where the tensors lie.
        dtype: of queries, keys and cache; None where the op has integers only.
        head_dims: widths that matter to the op, as (name, size) pairs: Lkv, P, R, V.
        block_size: tokens a block, or None where the op has no cache.
        query_lens: what the op needs of query lengths.
        cache_in_words: the cache is not empty, and its entries are whole 16-byte words, aligned as such.
        out_dtype: of the output; None where the op gives no choice.
    """

    op: str
    device: torch.device
    dtype: torch.dtype | None = None
    head_dims: tuple[tuple[str, int], ...] = ()
    block_size: int | None = None
    query_lens: QueryLenSupport = QueryLenSupport.SINGLE_ONLY
    cache_in_words: bool = True
    out_dtype: torch.dtype | None = None


DECODES = ("mla_decode", "decode_programs")  # of one backend together
MESSAGES = ("pack_attn_state", "combine_attn_states")  # likewise
CACHE_OPS = (  # whose requests have a block size, besides those of DECODES
    "concat_and_cache_mla", "copy_blocks", "gather_and_maybe_dequant_cache", "rope_norm_and_cache", "swap_blocks",
)  # fmt: skip
# op to the op that reads the buffers it writes: a backend serves the first only where it has the second
_READER = {"pack_attn_state": "combine_attn_states"}


class LazyKernels(Mapping):
    """The launchers of a kernel set whose modules are imported when the first one is taken.

    Args:
        package: such as "fast.kernels.triton"; its KERNELS holds the launchers.
        ops: their names, known without importing it.
    """

    def __init__(self, package: str, ops: tuple[str, ...]):
        self.package, self.ops = package, ops

    def __getitem__(self, op: str) -> Callable:
        if op not in self.ops:
            raise KeyError(op)
        return importlib.import_module(self.package).KERNELS[op]

    def __contains__(self, op: object) -> bool:
        return op in self.ops

    def __iter__(self) -> Iterator[str]:
        return iter(self.ops)

    def __len__(self) -> int:
        return len(self.ops)


_WIDTH_OF_SUPPORT = {QueryLenSupport.SINGLE_ONLY: 0, QueryLenSupport.UNIFORM: 1, QueryLenSupport.VARLEN: 2}


@dataclass(frozen=True)
class Backend:
    """A backend and what it can do. None means any.

    Attributes:
        name: what `backend=` asks for.
        priority: the largest that can serve is chosen.
        device_type: of torch.device.
        capability: least CUDA compute capability.
        dtypes: of queries, keys and cache.
        head_dims: allowed sizes by name.
        block_sizes: allowed block sizes.
        query_lens: the widest query-length support of its decode.
        kernels: op name to launcher, for the ops that the backend has kernels of its own for.
        missing_package: a package it needs that is not installed.
        capability_end: the first capability above the least that it does not serve.
        needs_words: of the cache, as the copy engine does (`KernelRequest.cache_in_words`).
        out_dtypes: of outputs, where a call may choose; None for those of `dtypes`.
        rocm: whether the kernels have been tested on AMD GPUs, which torch calls "cuda" as well.
    """

    name: str
    priority: int
    device_type: str
    kernels: Mapping  # unparametrised: a run-time check of its values would import them
    dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES
    capability: tuple[int, int] | None = None
    head_dims: Mapping[str, tuple[int, ...]] | None = None
    block_sizes: tuple[int, ...] | None = None
    query_lens: QueryLenSupport = QueryLenSupport.VARLEN
    missing_package: str | None = None
    capability_end: tuple[int, int] | None = None
    needs_words: bool = False
    out_dtypes: tuple[torch.dtype, ...] | None = None
    rocm: bool = False

    def validate_configuration(self, request: KernelRequest) -> list[str]:
        """Every reason why this backend cannot serve the request; empty where it can."""
        reasons = []
        if self.missing_package is not None:
            reasons.append(f"{self.name}: needs the package {self.missing_package}, which is not installed")
        reasons += [f"{self.name}: has no kernel for {op}" for op in _needed(request.op) if op not in self.kernels]
        if request.device.type != self.device_type:
            reasons.append(f"{self.name}: serves device {self.device_type}, got {request.device.type}")
        elif self.device_type == "cuda" and torch.version.hip is not None:  # its capabilities are not NVIDIA's
            if not self.rocm:
                reasons.append(f"{self.name}: not tested on ROCm, serves NVIDIA GPUs, got ROCm {torch.version.hip}")
        elif self.capability is not None:
            found = torch.cuda.get_device_capability(request.device)
            if found < self.capability or (self.capability_end is not None and found >= self.capability_end):
                below = "" if self.capability_end is None else f" and below {self.capability_end}"
                reasons.append(f"{self.name}: needs compute capability {self.capability}{below}, got {found}")
        if request.dtype is not None and request.dtype not in self.dtypes:
            reasons.append(f"{self.name}: serves {', '.join(map(str, self.dtypes))}, got {request.dtype}")
        out_dtypes = self.dtypes if self.out_dtypes is None else self.out_dtypes
        if request.out_dtype is not None and request.out_dtype not in out_dtypes:
            reasons.append(f"{self.name}: writes {', '.join(map(str, out_dtypes))}, got {request.out_dtype}")
        for dim, size in request.head_dims:
            allowed = None if self.head_dims is None else self.head_dims.get(dim)
            if allowed is not None and size not in allowed:
                reasons.append(f"{self.name}: serves {dim} in {allowed}, got {size}")
        if self.block_sizes is not None and request.block_size not in (None, *self.block_sizes):
            reasons.append(f"{self.name}: serves block sizes {self.block_sizes}, got {request.block_size}")
        if self.needs_words and not request.cache_in_words:
            reasons.append(f"{self.name}: needs a cache of whole, aligned 16-byte words, with at least one block")
        if _WIDTH_OF_SUPPORT[request.query_lens] > _WIDTH_OF_SUPPORT[self.query_lens]:
            reasons.append(f"{self.name}: serves query lengths {self.query_lens.value}, got {request.query_lens.value}")
        return reasons


def _needed(op: str) -> tuple[str, ...]:
    """The ops whose kernels a backend needs to serve one: itself, and what reads the private buffers it writes."""
    return (op, _READER[op]) if op in _READER else (op,)


def _missing(package: str, least: str) -> str | None:
    """What to install, or None where a package of at least that version is there; it is not imported."""
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return package
    numbers = [[int(part) for part in re.findall(r"\d+", version)[:2]] for version in (found, least)]
    return None if numbers[0] >= numbers[1] else f"{package} {least} or later (found {found})"


BACKENDS: tuple[Backend, ...] = (
    Backend(name="cpu", priority=0, device_type="cpu", kernels=cpu.KERNELS),
    Backend(
        name="triton",
        priority=10,
        device_type="cuda",
        capability=(8, 0),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        kernels=LazyKernels("fast.kernels.triton", tuple(cpu.KERNELS)),
        missing_package=None if importlib.util.find_spec("triton") else "triton",
    ),
    Backend(
        name="hopper",
        priority=20,
        device_type="cuda",
        capability=(9, 0),
        capability_end=(10, 0),
        dtypes=(torch.bfloat16, torch.float16),
        out_dtypes=(torch.float32, torch.bfloat16, torch.float16),
        head_dims={"kv_lora_rank": (256, 512), "qk_rope_head_dim": (0, 32, 64)},
        block_sizes=(16, 32, 64, 128),
        kernels=LazyKernels("fast.kernels.hopper", DECODES),
        needs_words=True,
        missing_package=_missing("triton", "3.6"),
    ),
)


def query_lens_of(num_tokens: int, num_requests: int, max_query_len: int) -> QueryLenSupport:
    """What a batch needs, from its shape alone: lengths are all equal where they fill B x max_query_len."""
    if num_tokens != num_requests * max_query_len:
        return QueryLenSupport.VARLEN
    return QueryLenSupport.SINGLE_ONLY if max_query_len <= 1 else QueryLenSupport.UNIFORM


def candidates(backend: str | None) -> list[Backend]:
    """The backends that a request may go to, best first: the named one, or all.

    Raises:
        ValueError: no backend has that name.
    """
    if backend is None:
        return sorted(BACKENDS, key=lambda candidate: -candidate.priority)
    named = [candidate for candidate in BACKENDS if candidate.name == backend]
    check(len(named) > 0, "backend", f"one of {', '.join(b.name for b in BACKENDS)}", backend)
    return named


def _check_request(request: KernelRequest) -> None:
    """Types of what is asked for; whether it can be served is for the backends to say."""
    check_type("request", request, KernelRequest)
    check_type("request.op", request.op, str)
    check_type("request.device", request.device, torch.device)
    check_type("request.dtype", request.dtype, (torch.dtype, type(None)), "a dtype or None")
    check_type("request.out_dtype", request.out_dtype, (torch.dtype, type(None)), "a dtype or None")
    check_type("request.head_dims", request.head_dims, tuple, "a tuple of names and sizes")
    check_type("request.query_lens", request.query_lens, QueryLenSupport)
    check_flag("request.cache_in_words", request.cache_in_words)
    if request.block_size is not None:
        check_int("request.block_size", request.block_size, 0)


def select(request: KernelRequest, backend: BackendChoice = None) -> Backend:
    """The backend that serves a request.

    Args:
        request: what is needed.
        backend: a name; a mapping from op to name, which names the backend of this op or leaves it open; or None for
            the first in priority that can serve.

    Raises:
        ValueError: no backend has that name; a mapping that `bind` refuses.
        UnsupportedConfiguration: the named one, or none at all, can serve; with every reason.
    """
    _check_request(request)
    tried = candidates(_name_for(request.op, backend))
    for candidate in tried:
        if request.op in candidate.kernels and not candidate.validate_configuration(request):
            return candidate
    raise UnsupportedConfiguration(
        [reason for candidate in tried for reason in candidate.validate_configuration(request)]
    )


class BoundOps(dict):
    """A mapping from op to name that `bind` made: known to be right, so that no op checks it again."""


def bind(backend: BackendChoice, ops: Iterable[str] | None = None) -> BoundOps | None:
    """Resolve `backend=` of whatever calls several ops into what each of those ops is given.

    Args:
        backend: a name, which binds the ops that this backend declares; a mapping from op to name; or None.
        ops: the ops that are called; None for all.

    Returns:
        A mapping from op to name for the `backend=` of those ops, or None where every op is chosen.

    Raises:
        ValueError: no backend has a name, nothing has an op, or two backends are named for ops that belong together.
        UnsupportedConfiguration: a named backend declares none of `ops`, or not the op of a mapping that names it.
    """
    if backend is None or isinstance(backend, BoundOps):
        return backend
    if isinstance(backend, str):
        (named,) = candidates(backend)
        used = _all_ops() if ops is None else tuple(ops)
        if not any(op in named.kernels for op in used):
            raise UnsupportedConfiguration([f"{backend}: has no kernel for {op}" for op in used])
        return BoundOps((op, backend) for op in named.kernels)
    _check_mapping(backend)
    bound = BoundOps(backend)
    for together in (DECODES, MESSAGES):
        for name in {backend[op] for op in together if op in backend}:  # one or none
            bound.update((op, name) for op in together if _has(name, op))
    return bound


def _all_ops() -> list[str]:
    """Every op that some backend declares, by name."""
    return sorted({op for candidate in BACKENDS for op in candidate.kernels})


def _has(name: object, op: object = None) -> bool:
    """Whether a backend of that name exists, and declares the op where one is given."""
    return any(each.name == name and (op is None or op in each.kernels) for each in BACKENDS)


def _check_mapping(backend: object) -> None:
    """Raise where a mapping from op to name is none, or names what nothing has."""
    if not isinstance(backend, Mapping):
        check(False, "backend", "None, a name or a mapping from op to name", type(backend).__name__)
    unserved = [(op, name) for op, name in backend.items() if not _has(name, op)]
    for op, name in unserved:
        check(op in _all_ops(), "backend", f"a mapping from some of {', '.join(_all_ops())}", op)
        check(_has(name), f"backend[{op!r}]", f"one of {', '.join(each.name for each in BACKENDS)}", name)
    if unserved:
        raise UnsupportedConfiguration([f"{name}: has no kernel for {op}" for op, name in unserved])
    for together in (DECODES, MESSAGES):
        names = sorted({backend[op] for op in together if op in backend})
        if len(names) > 1:
            check(False, "backend", f"one name for {', '.join(together)}", " and ".join(names))


def _name_for(op: str, backend: BackendChoice) -> str | None:
    """The name that a choice gives to an op; None leaves the op open."""
    if backend is None or isinstance(backend, str):
        return backend
    return bind(backend).get(op)


def kernel(name: str, op: str) -> Callable:
    """The launcher of one op in one backend; both names come from `select`."""
    return next(candidate for candidate in BACKENDS if candidate.name == name).kernels[op]


def decode_request(
    device: torch.device,
    dtype: torch.dtype,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_size: int,
    query_lens: QueryLenSupport,
    cache_in_words: bool = True,
    op: str = "mla_decode",
    out_dtype: torch.dtype | None = None,
) -> KernelRequest:
    """What `mla_decode`, or another op of DECODES, needs of a kernel."""
    return KernelRequest(
        op=op,
        device=device,
        dtype=dtype,
        head_dims=(("kv_lora_rank", kv_lora_rank), ("qk_rope_head_dim", qk_rope_head_dim)),
        block_size=block_size,
        query_lens=query_lens,
        cache_in_words=cache_in_words,
        out_dtype=out_dtype,
    )


def cache_in_words(kv_cache: torch.Tensor) -> bool:
    """Whether the copy engine can read a cache, as `KernelRequest` asks: rows of 16-byte words, one after another.

    Args:
        kv_cache: [num_blocks, block_size, Lkv + R], any strides; bfloat16 or float16.
    """
    size = kv_cache.element_size()
    *outer, inner = kv_cache.stride()
    words = all(stride > 0 and stride * size % 16 == 0 for stride in outer)
    if not torch.compiler.is_compiling():  # a trace knows no offsets; the launcher refuses one that does not fit
        words = words and kv_cache.storage_offset() * size % 16 == 0
    return words and inner == 1 and kv_cache.numel() > 0


def layer_requests(config: MLAConfig, device: torch.device, dtype: torch.dtype, block_size: int) -> list[KernelRequest]:
    """What a layer of these dims needs of kernels, a request an op, by name; query lengths of every kind.

    Args:
        config: the layer.
        device: where it runs.
        dtype: in which type.
        block_size: tokens a cache block.
    """
    dims = config.kv_lora_rank, config.qk_rope_head_dim
    requests = []
    for op in _all_ops():
        if op in DECODES:
            requests.append(decode_request(device, dtype, *dims, block_size, QueryLenSupport.VARLEN, op=op))
        elif op == "plan_decode":
            requests.append(KernelRequest(op, device))
        else:
            requests.append(KernelRequest(op, device, dtype, block_size=block_size if op in CACHE_OPS else None))
    return requests


def explain(
    config: MLAConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    block_size: int = 64,
    backend: BackendChoice = None,
) -> str:
    """One line per op of a layer: the backend that serves it, and why the others do not.

    Where `backend` names one, each line says besides whether the op is bound to it or chosen as for None.

    Args:
        config: the layer.
        device: where it runs.
        dtype: in which type.
        block_size: tokens a cache block.
        backend: as that of the layer: a name, a mapping from op to name, or None for the choice by capability.

    Raises:
        ValueError: no backend has a name, or nothing has an op of a mapping.
    """
    check_config(config)
    device = check_device("device", device)
    check_type("dtype", dtype, torch.dtype)
    check_int("block_size", block_size)
    bound, lines = bind(backend), []
    for request in layer_requests(config, device, dtype, block_size):
        name = _name_for(request.op, bound)
        how = "" if bound is None else ", chosen" if name is None else ", bound"
        try:
            served, refused = select(request, bound).name, []
        except UnsupportedConfiguration as error:
            served, refused = "none", list(error.reasons)
            how = how if name is None else f", bound to {name}"
        if name is None and not refused:
            refused = [reason for candidate in BACKENDS for reason in candidate.validate_configuration(request)]
        because = f" ({'; '.join(refused)})" if refused else ""
        lines.append(f"{request.op}: {served}{how}{because}")
    return "\n".join(lines)
