"""Declarations of backends, and the registry of all backends. Other Python packages can register backends too."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from reference.interfaces import (
    COMPUTE_FORMAT,
    CONVERTED,
    FLOAT_DTYPES,
    GraphSupport,
    QueryLenSupport,
    check,
    check_flag,
    check_fp8_mode,
    check_int,
    check_type,
)
from reference.interfaces.support import constant_when_traced

from .kernel_request import HEAD_DIMS, MASKS, KernelRequest, check_features

ENTRY_POINTS = "mla_twins.backends"  # entry point group in which other packages declare backends


@dataclass(frozen=True)
class OpSupport:
    """The declaration of one op of a backend: all calls of the op that the backend can serve.

    Attributes:
        launcher: the function that launches the kernel, or its dotted path "package.module:function". A path is
            imported when the op is called for the first time, so that a declaration imports no kernel.
        dtypes: supported dtypes of queries and keys.
        out_dtypes: supported dtypes of the output, if a caller may choose the dtype; None means the same as `dtypes`.
        cache_formats: names of the supported cache formats.
        head_dims: mapping from the name of a width (`KernelRequest.head_dims`) to its supported sizes. A width that is
            missing in the mapping may have any size. None means that every width may have any size.
        block_sizes: supported block sizes; None for any.
        batch_invariant: whether the kernel can be batch-invariant (`KernelRequest.batch_invariant`).
        invariant_on_request: whether the launcher of `flash_attn_varlen` must get `batch_invariant=True` for this.
        query_lens: the most general supported kind of query lengths.
        masks: supported masks, from `MASKS`.
        graph: the most general supported kind of CUDA graph.
        lse: whether the kernel returns the LSE; not used for an op without an LSE.
        same_out_dtype: whether the output always has the dtype of the queries; `out_dtypes` is then not used.
        whole_keys: whether the kernel needs each key in one tensor. Otherwise it also takes keys in two parts: one part
            of each head, and a rope part that all heads share. Only for `flash_attn_varlen`.
        narrow_values: whether values may not be wider than keys. Only for `flash_attn_varlen`.
        mixes_nan: whether a NaN or an infinity in a value of one request may reach the output of another request of the
            batch. The kernels of this package never do this. Only for `flash_attn_varlen` and `gqa_varlen_attention`.
        needs_words: whether the cache must consist of 16-byte words (`KernelRequest.cache_in_words`).
        reads: for an op that writes a message for other ranks: name of the op that reads the message. The backend must
            declare this reading op too. None for all other ops.
        priority: priority for this op; None for the priority of the backend.
        only_named: whether the backend serves this op only for calls that name the backend (`Backend.only_named`).
        plans_steps: whether a call that no builder has planned waits for the GPU and plans anew. An automatic choice
            takes this backend only for planned calls.
        family_priorities: mapping from a family of devices to the priority for this op on such a device, in place of
            `priority`. A family is "9.x" for all GPUs of compute capability 9, and so on.
        fp8_modes: supported modes of a decode over a cache in e4m3, from `FP8_MODES`. An op of grouped-query attention
            gets queries in the dtype of the model; in the mode "fp8_query" it rounds them to e4m3 first.
        format_modes: mapping from the name of a cache format to the modes of `fp8_modes` that the kernel supports over
            this format. A format that is missing in the mapping may have any mode of `fp8_modes`.
        head_scales: whether queries in e4m3 may have one scale for each head (`KernelRequest.head_scales`).
        features: supported features of grouped-query attention, from `FEATURES`. A kernel without "scales" ignores the
            scales of a cache. It serves only calls that name its backend, and raises if a scale is not 1.
        schedule_programs: for `gqa_paged_attention`: function, or its dotted path, that returns how many programs a
            schedule should have. Its arguments are device, dtype of the queries, N, Nkv, Dh, block size, length of the
            longest query, and cache format. None means that the kernel ignores schedules.
        cache_reasons: for `gqa_paged_attention`: function, or its dotted path, that returns why the kernel cannot read
            a cache with such strides, as a list of texts. Its argument is the cache. A layer asks before it writes.
        kept_call: function, or its dotted path, that gets the arguments of a call of the launcher, and returns a
            function with the same arguments and results for later calls with equal shapes, strides, dtypes, devices,
            alignments and other values (`fast.backends.kept_calls`). None calls the launcher each time. Only for
            `flash_attn_varlen` and `mla_decode`. If the attribute `allocates` of a function of `flash_attn_varlen` is
            True, a function for calls with `out` and without an LSE also serves such calls with `out=None`: it
            allocates the output, and returns None in place of the LSE.
        one_set_of_parameters: whether the backend plans the op once for all layers of a step, so that they must have
            the same window, soft cap, scale and so on. `check_one_set_of_parameters` refuses a model whose layers
            differ.
    """

    launcher: str | Callable
    dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES
    out_dtypes: tuple[torch.dtype, ...] | None = None
    cache_formats: tuple[str, ...] = (COMPUTE_FORMAT.name,)
    head_dims: Mapping[str, tuple[int, ...]] | None = None
    block_sizes: tuple[int, ...] | None = None
    batch_invariant: bool = True
    invariant_on_request: bool = False
    query_lens: QueryLenSupport = QueryLenSupport.VARLEN
    masks: tuple[str, ...] = MASKS
    graph: GraphSupport = GraphSupport.ANY
    lse: bool = True
    same_out_dtype: bool = False
    whole_keys: bool = False
    narrow_values: bool = False
    mixes_nan: bool = False
    needs_words: bool = False
    reads: str | None = None
    priority: int | None = None
    only_named: bool = False
    plans_steps: bool = False
    family_priorities: Mapping[str, int] = field(default_factory=dict)
    fp8_modes: tuple[str, ...] = (CONVERTED,)
    format_modes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    head_scales: bool = True
    features: tuple[str, ...] = ()
    schedule_programs: str | Callable | None = None
    cache_reasons: str | Callable | None = None
    kept_call: str | Callable | None = None
    one_set_of_parameters: bool = False

    def __post_init__(self):
        for name in ("launcher", "schedule_programs", "cache_reasons", "kept_call"):
            value = getattr(self, name)
            path = isinstance(value, str) and re.fullmatch(r"[\w.]+:\w+", value)
            missing = value is None and name != "launcher"
            check(bool(path) or callable(value) or missing, name, 'a function or "package.module:function"', value)
        for name in ("dtypes", "cache_formats", "masks", "fp8_modes"):
            check_type(name, getattr(self, name), tuple, "a tuple")
        for name in ("out_dtypes", "block_sizes"):
            check_type(name, getattr(self, name), (tuple, type(None)), "a tuple or None")
        check_type("head_dims", self.head_dims, (Mapping, type(None)), "a mapping from name to sizes, or None")
        unknown = sorted(set(self.head_dims or ()) - set(HEAD_DIMS))
        check(not unknown, "head_dims", f"names among {', '.join(HEAD_DIMS)}", ", ".join(map(str, unknown)))
        for mode in self.fp8_modes:
            check_fp8_mode(mode)
        check_type("format_modes", self.format_modes, Mapping, "a mapping from cache format to fp8 modes")
        for name, modes in self.format_modes.items():
            check(name in self.cache_formats, "format_modes", f"formats among {', '.join(self.cache_formats)}", name)
            check(set(modes) <= set(self.fp8_modes), f"format_modes[{name!r}]", f"some of {self.fp8_modes}", modes)
        check_features("features", self.features)
        check(set(self.masks) <= set(MASKS), "masks", f"some of {', '.join(MASKS)}", self.masks)
        for name in ("batch_invariant", "invariant_on_request", "lse", "needs_words", "same_out_dtype", "whole_keys",
                     "narrow_values", "mixes_nan", "one_set_of_parameters", "only_named", "head_scales",
                     "plans_steps"):  # fmt: skip
            check_flag(name, getattr(self, name))
        check_type("query_lens", self.query_lens, QueryLenSupport)
        check_type("graph", self.graph, GraphSupport)
        check_type("reads", self.reads, (str, type(None)), "the name of an op or None")
        if self.priority is not None:
            check_int("priority", self.priority, -(2**31), "an int or None")
        check_type("family_priorities", self.family_priorities, Mapping, "a mapping from family to priority")
        for family, priority in self.family_priorities.items():
            check(isinstance(family, str) and re.fullmatch(r"\d+\.x", family) is not None, "family_priorities",
                  'families such as "9.x"', family)  # fmt: skip
            check_int(f"family_priorities[{family!r}]", priority, -(2**31), "an int")

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        """Return whether the kernel serves queries and keys of a dtype."""
        return dtype in self.dtypes

    def reasons(self, request: KernelRequest) -> list[str]:
        """Return every reason why the kernel cannot serve `request`; the texts do not name the backend."""
        found = []
        if request.dtype is not None and not self.supports_dtype(request.dtype):
            found.append(f"serves {', '.join(map(str, self.dtypes))}, got {request.dtype}")
        out_dtypes = self.dtypes if self.out_dtypes is None else self.out_dtypes
        if self.same_out_dtype:
            out_dtypes = (request.dtype,)
        if request.out_dtype is not None and request.out_dtype not in out_dtypes:
            found.append(f"writes {', '.join(map(str, out_dtypes))}, got {request.out_dtype}")
        if request.cache_format is not None and request.cache_format.name not in self.cache_formats:
            found.append(f"reads caches in {', '.join(self.cache_formats)}, got {request.cache_format.name}")
        for dim, size in request.head_dims:
            allowed = None if self.head_dims is None else self.head_dims.get(dim)
            if allowed is not None and size not in allowed:
                found.append(f"serves {dim} in {allowed}, got {size}")
        widths = dict(request.head_dims)
        if self.narrow_values and widths.get("v_head_dim", 0) > widths.get("qk_head_dim", 0):
            found.append(f"serves values that are not wider than keys, got {widths['v_head_dim']} columns")
        if self.block_sizes is not None and request.block_size not in (None, *self.block_sizes):
            found.append(f"serves block sizes {self.block_sizes}, got {request.block_size}")
        if self.needs_words and not request.cache_in_words:
            found.append("needs a cache of whole, aligned 16-byte words, with at least one block")
        if not self.query_lens.covers(request.query_lens):
            found.append(f"serves {self.query_lens.value} query lengths, got {request.query_lens.value}")
        if request.mask is not None and request.mask not in self.masks:
            found.append(f"applies the masks {', '.join(self.masks) or 'none'}, got {request.mask}")
        if request.fp8_mode not in self.fp8_modes:
            found.append(f"decodes in the fp8 modes {', '.join(self.fp8_modes)}, got {request.fp8_mode}")
        elif request.cache_format is not None:
            modes = self.format_modes.get(request.cache_format.name, self.fp8_modes)
            if request.fp8_mode not in modes:
                found.append(f"decodes caches in {request.cache_format.name} in the fp8 modes {', '.join(modes)}, got "
                             f"{request.fp8_mode}")  # fmt: skip
        if request.head_scales and not self.head_scales:
            found.append("serves one scale for all queries, got one scale for each head")
        if missing := [feature for feature in request.features if feature not in self.features]:
            found.append(f"has no {', '.join(missing)}")
        if request.batch_invariant and not self.batch_invariant:
            found.append("is not batch-invariant")
        if request.lse and not self.lse:
            found.append("returns no LSE")
        if not self.graph.covers(request.graph):
            found.append(f"has graph support '{self.graph.value}', got a call that needs '{request.graph.value}'")
        return found


@dataclass(frozen=True)
class Backend:
    """A set of kernels behind one name, with a declaration for each op.

    Attributes:
        name: the name that `backend=` takes.
        priority: of all backends that can serve a call, the backend with the largest priority is chosen.
        device_type: `torch.device.type` of the supported devices.
        ops: mapping from op name to the declaration of the op. The backend cannot serve any other op.
        capability: lowest supported CUDA compute capability; None for any.
        capability_end: upper limit of the compute capability; the limit itself is not supported. None for no limit.
        missing_package: package that the backend needs and that is not installed; None if no package is missing.
        rocm: whether the kernels are tested on AMD GPUs. (The device type of an AMD GPU in torch is "cuda" too.)
        library: the library that has the kernels, such as "PyTorch"; None for kernels of this package.
        install: how to get a missing package, such as "pip install flash-attn"; None if there is nothing to say.
        missing_artifacts: a function without arguments, or its dotted path "package.module:function", that returns what
            else is missing on this machine, such as a shared library, as a list of texts. It is called once, when the
            backend could otherwise serve a call.
        only_named: if True, the backend serves only calls that name it; `backend=None` never chooses it.
        hooks: class of the hooks for steps with prefills, a subclass of `fast.mla.backend_hooks.BackendHooks`, or its
            dotted path "package.module:Class"; None for a backend without hooks of its own.
    """

    name: str
    priority: int
    device_type: str
    ops: Mapping[str, OpSupport]
    capability: tuple[int, int] | None = None
    capability_end: tuple[int, int] | None = None
    missing_package: str | None = None
    rocm: bool = False
    library: str | None = None
    install: str | None = None
    missing_artifacts: str | Callable[[], list[str]] | None = None
    only_named: bool = False
    hooks: str | type | None = None

    def __post_init__(self):
        check(isinstance(self.name, str) and self.name.isidentifier(), "name", "a name without spaces", self.name)
        check_int("priority", self.priority, -(2**31), "an int")
        check_type("device_type", self.device_type, str)
        check_type("ops", self.ops, Mapping, "a mapping from op to OpSupport")
        for op, support in self.ops.items():
            check_type(f"ops[{op!r}]", support, OpSupport)
        for name in ("capability", "capability_end"):
            check_type(name, getattr(self, name), (tuple, type(None)), "(major, minor) or None")
        check_flag("rocm", self.rocm)
        check_flag("only_named", self.only_named)
        for name in ("library", "install"):
            check_type(name, getattr(self, name), (str, type(None)), "a str or None")
        for name, what in (("missing_artifacts", "function"), ("hooks", "Class")):
            given = getattr(self, name)
            path = isinstance(given, str) and re.fullmatch(r"[\w.]+:\w+", given)
            check(given is None or bool(path) or callable(given), name, f'None, a {what.lower()} or "package.module:'
                  f'{what}"', given)  # fmt: skip

    def is_only_named(self, op: str) -> bool:
        """Return whether the backend serves an op only for calls that name it."""
        return self.only_named or (op in self.ops and self.ops[op].only_named)

    def priority_of(self, op: str, family: str | None = None) -> int:
        """Return the priority for an op: of the family of devices, else of the op, else of the backend.

        Args:
            op: name of the op.
            family: family of the device, such as "9.x"; None for a CPU.
        """
        support = self.ops.get(op)
        if support is None:
            return self.priority
        found = support.family_priorities.get(family, support.priority)
        return self.priority if found is None else found

    def is_available(self) -> bool:
        """Return whether all packages and artifacts that the backend needs are on this machine."""
        return not self.missing()

    def missing(self) -> tuple[str, ...]:
        """Return what the backend needs and this machine lacks: a package, or the artifacts of an installed package."""
        if self.missing_package is not None:
            how = "" if self.install is None else f" ({self.install})"
            return (f"needs the package {self.missing_package}, which is not installed{how}",)
        return () if self.missing_artifacts is None else _artifacts_missing(self.missing_artifacts)

    def supports_compute_capability(self, capability: tuple[int, int]) -> bool:
        """Return whether the kernels run on NVIDIA GPUs of a compute capability, given as (major, minor)."""
        low = self.capability is None or capability >= self.capability
        return self.device_type == "cuda" and low and (self.capability_end is None or capability < self.capability_end)

    def supports_dtype(self, op: str, dtype: torch.dtype) -> bool:
        """Return whether the backend declares an op for queries and keys of a dtype."""
        return op in self.ops and self.ops[op].supports_dtype(dtype)

    def validate_configuration(self, request: KernelRequest) -> list[str]:
        """Return every reason why this backend cannot serve `request`; an empty list if it can serve `request`."""
        reasons = []
        support = self.ops.get(request.op)
        needed = [request.op] if support is None or support.reads is None else [request.op, support.reads]
        reasons += [f"has no kernel for {op}" for op in needed if op not in self.ops]
        if request.device.type != self.device_type:
            reasons.append(f"serves device {self.device_type}, got {request.device.type}")
        elif self.device_type == "cuda" and torch.version.hip is not None:  # on ROCm, capabilities have another meaning
            if not self.rocm:
                reasons.append(f"is not tested on ROCm and serves only NVIDIA GPUs, got ROCm {torch.version.hip}")
        elif self.capability is not None:
            found = torch.cuda.get_device_capability(request.device)
            if not self.supports_compute_capability(found):
                below = "" if self.capability_end is None else f" and below {self.capability_end}"
                reasons.append(f"needs a compute capability of at least {self.capability}{below}, got {found}")
        if support is not None:
            reasons += support.reasons(request)
        if self.missing_package is not None or not reasons:  # look for artifacts only if the call needs them
            reasons = [*self.missing(), *reasons]
        return [f"{self.name}: {reason}" for reason in reasons]


_REGISTERED: dict[str, Backend] = {}
_ARTIFACTS: dict[Any, tuple[str, ...]] = {}  # results of `Backend.missing_artifacts` by function or path
_ENTRY_POINTS_READ: list[bool] = []  # empty until the entry points are read
_ON_CHANGE: list[Callable[[], object]] = []  # functions to call when a backend is registered or removed


def on_change(forget: Callable[[], object]) -> None:
    """Call `forget` from now on whenever a backend is registered or removed, for example to clear a cache."""
    _ON_CHANGE.append(forget)


def changed() -> None:
    """Forget all choices of backends, after a change of what the registered backends serve."""
    for forget in _ON_CHANGE:
        forget()


def register(backend: Backend) -> None:
    """Add a backend, so that it can serve the ops that it declares.

    Another package can declare its backends with an entry point of the group "mla_twins.backends". The entry point is
    one `Backend`, an iterable of backends, or a function that returns a backend or an iterable of backends. Entry
    points are read once, when a backend is chosen for the first time.

    Args:
        backend: the backend; no registered backend may have its name.

    Raises:
        TypeError: `backend` is not a `Backend`.
        ValueError: a registered backend has the same name.
    """
    check_type("backend", backend, Backend)
    check(backend.name not in _REGISTERED, "backend.name", "a name that no backend has", backend.name)
    _REGISTERED[backend.name] = backend
    changed()


def unregister(name: str) -> None:
    """Remove a registered backend.

    Args:
        name: name of the backend.

    Raises:
        ValueError: no backend has that name.
    """
    names = [backend.name for backend in registered()]
    check(name in names, "name", f"one of {', '.join(names)}", name)
    del _REGISTERED[name]
    changed()


@constant_when_traced
def _read_entry_points() -> bool:
    """Register the backends of other packages. If an entry point fails, skip it and warn with its name."""
    if _ENTRY_POINTS_READ:  # an entry point may call `registered` while it is loaded
        return True
    _ENTRY_POINTS_READ.append(True)
    failed = []
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        before = dict(_REGISTERED)
        try:
            found = entry.load()
            found = found() if callable(found) else found
            for backend in [found] if isinstance(found, Backend) else found:
                register(backend)
        except Exception as error:
            _REGISTERED.clear()
            _REGISTERED.update(before)
            changed()
            failed.append(f"backend {entry.name} of {entry.value} is left out: {error}")
    for message in failed:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    return True


def registered() -> tuple[Backend, ...]:
    """Return all backends in the order of their registration, including the backends of entry points."""
    if not _ENTRY_POINTS_READ:
        _read_entry_points()
    return tuple(_REGISTERED.values())


def family_of(device: torch.device) -> str | None:
    """Return the family of a device: "9.x" for a GPU of compute capability 9 and so on; None for other devices."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return f"{torch.cuda.get_device_capability(device)[0]}.x"


def by_priority(op: str, device: torch.device) -> tuple[Backend, ...]:
    """Return the backends that may be chosen automatically, the largest priority for the op and the device first."""
    candidates = [candidate for candidate in registered() if not candidate.is_only_named(op)]
    family = None
    if any(op in each.ops and each.ops[op].family_priorities for each in candidates):
        family = family_of(device)
    return tuple(sorted(candidates, key=lambda candidate: -candidate.priority_of(op, family)))


@constant_when_traced
def _artifacts_missing(function: str | Callable[[], list[str]]) -> tuple[str, ...]:
    """Return the result of `Backend.missing_artifacts`; call the function once in a process."""
    if function not in _ARTIFACTS:
        found = (imported(function) if isinstance(function, str) else function)()
        check_type("the result of missing_artifacts", found, (list, tuple), "a list of reasons")
        _ARTIFACTS[function] = tuple(found)
    return _ARTIFACTS[function]


def support_of(name: str, op: str) -> OpSupport:
    """Return the declaration of the op `op` of the backend `name`."""
    return _REGISTERED[name].ops[op]


def kernel(name: str, op: str) -> Callable:
    """Return the function that launches the op `op` of the backend `name`."""
    launcher = _REGISTERED[name].ops[op].launcher
    return imported(launcher) if isinstance(launcher, str) else launcher


@functools.cache
def imported(path: str) -> Callable:
    """Return the function or class at "package.module:name"."""
    module, _, function = path.partition(":")
    return getattr(importlib.import_module(module), function)
