"""Declarations of backends, and the registry of all backends. Other Python packages can register backends too."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import re
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from reference.interfaces import (
    check,
    check_flag,
    check_int,
    check_type,
)
from reference.interfaces.support import constant_when_traced

from .error_texts import in_one_line, visible
from .kernel_request import KernelRequest
from .op_support import OpSupport, check_op

ENTRY_POINTS = "mla_twins.backends"  # entry point group in which other packages declare backends


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
            backend could otherwise serve a call, or when a call that names the backend is refused. If the function
            raises an error, or returns something else, this counts as one reason.
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
        check(_is_device_type(self.device_type), "device_type", 'a type of torch.device, such as "cuda" or "cpu"',
              visible(self.device_type))  # fmt: skip
        check_type("ops", self.ops, Mapping, "a mapping from op to OpSupport")
        for op, support in self.ops.items():
            check_op("ops", op)
            check_type(f"ops[{op!r}]", support, OpSupport)
        for name in ("capability", "capability_end"):
            given = getattr(self, name)
            check_type(name, given, (tuple, type(None)), "(major, minor) or None")
            pair = given is None or (len(given) == 2 and all(type(each) is int and each >= 0 for each in given))
            check(pair, name, "two ints, (major, minor)", given)
        if self.capability is not None and self.capability_end is not None:
            check(self.capability < self.capability_end, "capability_end", f"more than {self.capability}",
                  self.capability_end)  # fmt: skip
        check_flag("rocm", self.rocm)
        check_flag("only_named", self.only_named)
        for name in ("missing_package", "library", "install"):
            check_type(name, getattr(self, name), (str, type(None)), "a str or None")
        for name, what in (("missing_artifacts", "function"), ("hooks", "Class")):
            given = getattr(self, name)
            path = isinstance(given, str) and re.fullmatch(r"[\w.]+:\w+", given)
            right = isinstance(given, type) if name == "hooks" else callable(given) and isinstance(given, Hashable)
            check(given is None or bool(path) or right, name, f'None, a {what.lower()} or "package.module:'
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

    def missing_for(self, request: KernelRequest) -> tuple[str, ...]:
        """Return what the backend needs for `request` and this machine lacks; a subclass may add a compiled kernel."""
        return self.missing()

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


def _is_device_type(name: str) -> bool:
    """Return whether PyTorch has devices of a type with this name."""
    try:
        return torch.device(name).type == name
    except RuntimeError:
        return False


class FailedEntryPoint(NamedTuple):
    """An entry point whose backends are left out.

    Attributes:
        name: name of the entry point.
        value: the object that it names, such as "package.module:BACKEND".
        error: type and text of the error, in one line.
    """

    name: str
    value: str
    error: str

    @property
    def in_words(self) -> str:
        """Return which entry point is left out, and why, in one line."""
        return f"backend {self.name} of {self.value} is left out: {self.error}"


_REGISTERED: dict[str, Backend] = {}
_ARTIFACTS: dict[Any, tuple[str, ...]] = {}  # results of `Backend.missing_artifacts` by function or path
_ENTRY_POINTS_READ: list[bool] = []  # empty until the entry points are read
_FAILED: list[FailedEntryPoint] = []
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
    points are read once, when a backend is chosen for the first time. An entry point that raises an error is left out;
    `failed_entry_points` returns its error.

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
    """Register the backends of other packages. If an entry point fails, skip it, keep its error, and warn."""
    if _ENTRY_POINTS_READ:  # an entry point may call `registered` while it is loaded
        return True
    _ENTRY_POINTS_READ.append(True)
    _FAILED.clear()
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        before = dict(_REGISTERED)
        try:
            found = entry.load()
            found = found() if callable(found) else found
            check_type("the entry point", found, (Backend, Iterable), "a Backend, backends or a function")
            for backend in [found] if isinstance(found, Backend) else found:
                register(backend)
        except (Exception, SystemExit) as error:
            _REGISTERED.clear()
            _REGISTERED.update(before)
            changed()
            _FAILED.append(FailedEntryPoint(entry.name, entry.value, in_one_line(error)))
    for failure in _FAILED:
        warnings.warn(failure.in_words, RuntimeWarning, stacklevel=2)
    return True


def failed_entry_points() -> tuple[FailedEntryPoint, ...]:
    """Return the entry points that failed when they were read, in their order; their backends are left out."""
    registered()
    return tuple(_FAILED)


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
        try:
            found = (imported(function) if isinstance(function, str) else function)()
            check_type("the result of missing_artifacts", found, (list, tuple), "a list of reasons")
            for reason in found:
                check_type("the result of missing_artifacts", reason, str, "a list of reasons")
        except (Exception, SystemExit) as error:  # a library that does not fit the machine may raise any error
            found = [f"cannot look for its artifacts: {in_one_line(error)}"]
        _ARTIFACTS[function] = tuple(found)
    return _ARTIFACTS[function]


def support_of(name: str, op: str) -> OpSupport:
    """Return the declaration of the op `op` of the backend `name`."""
    return _REGISTERED[name].ops[op]


@functools.cache
def imported(path: str) -> Callable:
    """Return the function or class at "package.module:name"."""
    module, _, function = path.partition(":")
    return getattr(importlib.import_module(module), function)
