"""Which kernel set serves a call: each declares what it can do; the choice is by capability, then priority.

A kernel set that is asked for by name and cannot serve raises with every reason; it is never replaced.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

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

from .kernels import cpu


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
    """

    op: str
    device: torch.device
    dtype: torch.dtype | None = None
    head_dims: tuple[tuple[str, int], ...] = ()
    block_size: int | None = None
    query_lens: QueryLenSupport = QueryLenSupport.SINGLE_ONLY
    cache_in_words: bool = True


DECODES = ("mla_decode", "mla_decode_parts", "merge_decode_parts", "decode_programs")  # of one kernel set together


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
    """A kernel set and what it can do. None means any.

    Attributes:
        name: what `backend=` asks for.
        priority: the largest that can serve is chosen.
        device_type: of torch.device.
        capability: least CUDA compute capability.
        dtypes: of queries, keys and cache.
        head_dims: allowed sizes by name.
        block_sizes: allowed block sizes.
        query_lens: the widest query-length support of its decode.
        kernels: op name to launcher.
        missing_package: a package it needs that is not installed.
        capability_end: the first capability above the least that it does not serve.
        needs_words: of the cache, as the copy engine does (`KernelRequest.cache_in_words`).
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

    def validate_configuration(self, request: KernelRequest) -> list[str]:
        """Every reason why this kernel set cannot serve the request; empty where it can."""
        reasons = []
        if self.missing_package is not None:
            reasons.append(f"{self.name}: needs the package {self.missing_package}, which is not installed")
        if request.op not in self.kernels:
            reasons.append(f"{self.name}: has no kernel for {request.op}")
        if request.device.type != self.device_type:
            reasons.append(f"{self.name}: serves device {self.device_type}, got {request.device.type}")
        elif self.capability is not None:
            found = torch.cuda.get_device_capability(request.device)
            if found < self.capability or (self.capability_end is not None and found >= self.capability_end):
                below = "" if self.capability_end is None else f" and below {self.capability_end}"
                reasons.append(f"{self.name}: needs compute capability {self.capability}{below}, got {found}")
        if request.dtype is not None and request.dtype not in self.dtypes:
            reasons.append(f"{self.name}: serves {', '.join(map(str, self.dtypes))}, got {request.dtype}")
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
        head_dims={"kv_lora_rank": (256, 512), "qk_rope_head_dim": (0, 32, 64)},
        block_sizes=(16, 32, 64, 128),
        kernels=LazyKernels("fast.kernels.hopper", tuple(cpu.KERNELS)),
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
    """The kernel sets that a request may go to, best first: the named one, or all.

    Raises:
        ValueError: no kernel set has that name.
    """
    if backend is None:
        return sorted(BACKENDS, key=lambda candidate: -candidate.priority)
    named = [candidate for candidate in BACKENDS if candidate.name == backend]
    check(bool(named), "backend", f"one of {', '.join(b.name for b in BACKENDS)}", backend)
    return named


def _check_request(request: KernelRequest) -> None:
    """Types of what is asked for; whether it can be served is for the kernel sets to say."""
    check_type("request", request, KernelRequest)
    check_type("request.op", request.op, str)
    check_type("request.device", request.device, torch.device)
    check_type("request.dtype", request.dtype, (torch.dtype, type(None)), "a dtype or None")
    check_type("request.head_dims", request.head_dims, tuple, "a tuple of names and sizes")
    check_type("request.query_lens", request.query_lens, QueryLenSupport)
    check_flag("request.cache_in_words", request.cache_in_words)
    if request.block_size is not None:
        check_int("request.block_size", request.block_size, 0)


def select(request: KernelRequest, backend: str | None = None) -> Backend:
    """The kernel set that serves a request.

    Args:
        request: what is needed.
        backend: a name, or None for the first in priority that can serve.

    Raises:
        ValueError: no kernel set has that name.
        UnsupportedConfiguration: the named one, or none at all, can serve; with every reason.
    """
    _check_request(request)
    reasons: list[str] = []
    for candidate in candidates(backend):
        found = candidate.validate_configuration(request)
        if not found:
            return candidate
        reasons += found
    raise UnsupportedConfiguration(reasons)


def kernel(name: str, op: str) -> Callable:
    """The launcher of one op in one kernel set; both names come from `select`."""
    return next(candidate for candidate in BACKENDS if candidate.name == name).kernels[op]


def decode_request(
    device: torch.device,
    dtype: torch.dtype,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_size: int,
    query_lens: QueryLenSupport,
    cache_in_words: bool = True,
) -> KernelRequest:
    """What `mla_decode` needs of a kernel."""
    return KernelRequest(
        op="mla_decode",
        device=device,
        dtype=dtype,
        head_dims=(("kv_lora_rank", kv_lora_rank), ("qk_rope_head_dim", qk_rope_head_dim)),
        block_size=block_size,
        query_lens=query_lens,
        cache_in_words=cache_in_words,
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


def explain(
    config: MLAConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    block_size: int = 64,
    backend: str | None = None,
) -> str:
    """One line per op of a layer: the kernel set that serves it, and why the others do not.

    Args:
        config: the layer.
        device: where it runs.
        dtype: in which type.
        block_size: tokens a cache block.
        backend: a name, or None for the choice by capability.

    Raises:
        ValueError: no kernel set has that name.
    """
    check_config(config)
    device = check_device("device", device)
    check_type("dtype", dtype, torch.dtype)
    check_int("block_size", block_size)
    decode = decode_request(
        device, dtype, config.kv_lora_rank, config.qk_rope_head_dim, block_size, QueryLenSupport.VARLEN
    )
    ops = sorted({op for candidate in BACKENDS for op in candidate.kernels})
    lines = []
    for op in ops:
        request = replace(decode, op=op) if op in DECODES else KernelRequest(op, device, dtype)
        try:
            lines.append(f"{op}: {select(request, backend).name}")
        except UnsupportedConfiguration as error:
            lines.append(f"{op}: none ({error})")
            continue
        refused = [reason for candidate in BACKENDS for reason in candidate.validate_configuration(request)]
        if refused and backend is None:
            lines[-1] += f" ({'; '.join(refused)})"
    return "\n".join(lines)
