"""Replay a recorded call of an op: allocate its tensors and launch its kernels, without the op's host code.

The host code of an op reads shapes, strides and numbers, allocates tensors, and launches kernels. Two calls with the
same signature (the same shapes, dtypes and values, see `checked_calls`) differ only in the addresses of their tensors.
A `Recorder` watches one call. It records the allocations, the launches, and which tensor each address belongs to. A
`Replay` of this record takes a few microseconds of Python, however long the host code of the op takes.

Some calls cannot be replayed (`CannotReplay`), and the host code of the op then runs in every call
(`repeated_launches`). The main reasons are:

- the host code calls an op of torch that is neither an allocation (`torch.empty`, `torch.zeros`) nor a view;
- a result is neither an input nor a new tensor;
- an address belongs to no known tensor, or to several tensors.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

KNOWN_VERSIONS = ((3, 6), (3, 7))  # versions of Triton that replays support
MISFIT = object()  # returned by a replay if the host code of the op must run instead
MOST_ADDRESSES = 512  # largest number of encoded TMA descriptors, one for each address, kept for a tensor argument
_ZEROS = torch.ops.aten.zeros.default
_ALLOCATIONS = frozenset({
    _ZEROS, torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default, torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default, torch.ops.aten.new_empty_strided.default,
})  # fmt: skip


class Origin(NamedTuple):
    """Where an address comes from.

    Attributes:
        new: True for a tensor that the call allocates, False for an input.
        place: number of the allocation, or number of the input.
        offset: bytes from the first element of the allocation or input to the address.
    """

    new: bool
    place: int
    offset: int = 0


class Launch(NamedTuple):
    """One launch of a recorded call.

    Attributes:
        compiled: Triton's compiled kernel.
        grid: number of programs in three dimensions.
        arguments: all arguments of the kernel.
    """

    compiled: Any
    grid: tuple[int, int, int]
    arguments: tuple


class Allocation(NamedTuple):
    """One allocation of a recorded call.

    Attributes:
        allocate: `torch.empty` or `torch.zeros`.
        size: size of the tensor.
        options: dtype and device of the tensor.
    """

    allocate: Callable[..., Tensor]
    size: tuple[int, ...]
    options: dict[str, Any]


class CannotReplay(Exception):
    """Raised for a call that a replay cannot repeat."""


class Recorder(TorchDispatchMode):
    """Watch one call: while this dispatch mode is active, record each allocation, each view and each other op of torch.

    Args:
        arguments: arguments of the call.
    """

    def __init__(self, arguments: tuple):
        super().__init__()
        self.inputs = [each for each in _flat(arguments) if isinstance(each, Tensor)]
        self.allocations: list[Tensor] = []
        self.zeroed: list[bool] = []  # for each allocation, whether the call filled it with zeros when it was made
        self.launches: list[Launch] = []
        self.other_op: str | None = None
        self._origins: dict[int, Origin] = {}
        self._seen: list[Tensor] = []  # keeps the tensors alive, so that no other object can get their ids
        for place, tensor in enumerate(self.inputs):
            self._note(tensor, Origin(False, place))

    def _note(self, tensor: Tensor, origin: Origin) -> None:
        self._seen.append(tensor)
        self._origins.setdefault(id(tensor), origin)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an op of torch, and record it."""
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self._note(result, Origin(True, len(self.allocations)))
            self.allocations.append(result)
            self.zeroed.append(func is _ZEROS)
        elif func.is_view and isinstance(args[0], Tensor) and id(args[0]) in self._origins:
            source = self._origins[id(args[0])]
            for view in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(view, Tensor):
                    shift = view.data_ptr() - args[0].data_ptr() if view.numel() else 0
                    self._note(view, source._replace(offset=source.offset + shift))
        else:
            self.other_op = str(func)
        return result

    def forget(self) -> None:
        """Drop all tensors of the call."""
        for kept in (self.inputs, self.allocations, self.zeroed, self.launches, self._seen, self._origins):
            kept.clear()

    def repeated_inputs(self) -> list[int]:
        """Return which inputs are the same tensor object, in the form of `_repeated`."""
        return _repeated(self.inputs)

    def origin_of(self, tensor: Tensor) -> Origin:
        """Return the origin of a tensor's address.

        Raises:
            CannotReplay: the tensor is neither an input, nor a new tensor, nor a view of an input or new tensor.
        """
        origin = self._origins.get(id(tensor))
        if origin is None:
            raise CannotReplay("a tensor of unknown origin")
        return origin

    def origin_of_address(self, address: int) -> Origin:
        """Return the origin of an address.

        Raises:
            CannotReplay: several tensors have this address, or no tensor has this address.
        """
        origins = {self._origins[id(each)] for each in self._seen if each.data_ptr() == address}
        if len(origins) != 1:
            raise CannotReplay("an address of uncertain origin")
        return origins.pop()

    def place_of_result(self, tensor: Tensor) -> int:
        """Return the number of the input or new tensor that is the result; new tensors are counted behind all inputs.

        Raises:
            CannotReplay: the result is a view of an input or of a new tensor.
        """
        origin = self.origin_of(tensor)
        whole = self.allocations[origin.place] if origin.new else self.inputs[origin.place]
        if origin.offset or (tensor.shape, tensor.stride(), tensor.dtype) != (whole.shape, whole.stride(), whole.dtype):
            raise CannotReplay("a result that is neither an input nor a new tensor")
        return origin.place + len(self.inputs) * origin.new


class Replay:
    """Replay of a recorded call; the replay keeps no tensor alive.

    Args:
        recorder: record of the call, with its launches.
        arguments: arguments of the call.
        result: result of the call.

    Raises:
        CannotReplay: the call did something other than allocate tensors and launch kernels.
    """

    def __init__(self, recorder: Recorder, arguments: tuple, result: Any):
        from triton import knobs
        from triton.runtime import driver

        if recorder.other_op is not None or not recorder.launches:
            raise CannotReplay(recorder.other_op or "a call without a launch")
        with_tensors = [_has_tensor(each) for each in arguments]
        self._values = _picker([place for place, has_tensor in enumerate(with_tensors) if not has_tensor])
        self._expected = self._values(arguments)
        self._inputs = _picker([place for place, has_tensor in enumerate(with_tensors) if has_tensor])
        self._in_records = any(isinstance(each, tuple) for each in self._inputs(arguments))
        self._repeated = recorder.repeated_inputs()
        self._allocations = [
            Allocation(torch.zeros if zeroed else torch.empty, *_allocation_like(tensor))
            for tensor, zeroed in zip(recorder.allocations, recorder.zeroed, strict=True)
        ]
        origins: dict[Origin, int] = {}
        self._launches = [_ReplayedLaunch(each, recorder, origins) for each in recorder.launches]
        self._driver, self._hooks = driver, knobs.runtime
        self._device = driver.active.get_current_device()
        devices = {each.get_device() for each in (*recorder.inputs, *recorder.allocations)}
        if not devices <= {-1, self._device}:  # -1 is the CPU
            raise CannotReplay("tensors on a device that is not the current one")
        inputs = len(recorder.inputs)
        self._addresses = [(origin.place + inputs * origin.new, origin.offset) for origin in origins]
        results = result if isinstance(result, tuple) else (result,)
        self._results = [None if each is None else recorder.place_of_result(each) for each in results]
        self._one_result = not isinstance(result, tuple)

    def run(self, arguments: tuple) -> Any:
        """Allocate tensors, launch the kernels and return the result; return MISFIT if the op's host code must run.

        The host code must run in four cases:

        - an argument that is not a tensor has another value than in the recorded call;
        - two arguments are the same tensor object, but were different objects in the recorded call, or the reverse;
        - another device is current;
        - Triton has a launch hook, for example of a profiler.
        """
        hooks, active = self._hooks, self._driver.active
        tensors = self._inputs(arguments)
        tensors = [each for each in _flat(tensors) if isinstance(each, Tensor)] if self._in_records else list(tensors)
        if (
            self._values(arguments) != self._expected
            or _repeated(tensors) != self._repeated
            or active.get_current_device() != self._device
            or calls_of(hooks.launch_enter_hook)
            or calls_of(hooks.launch_exit_hook)
        ):
            return MISFIT
        for allocate, size, options in self._allocations:
            tensors.append(allocate(size, **options))
        addresses = [tensors[place].data_ptr() + offset for place, offset in self._addresses]
        stream = active.get_current_stream(self._device)
        for each in self._launches:
            each.run(stream, addresses)
        results = [None if place is None else tensors[place] for place in self._results]
        return results[0] if self._one_result else tuple(results)


class _ReplayedLaunch:
    """One launch of a replay.

    Args:
        recorded: the recorded launch.
        recorder: record of the call.
        origins: a number for each origin of an address; this launch adds the origins of its addresses.
    """

    def __init__(self, recorded: Launch, recorder: Recorder, origins: dict[Origin, int]):
        self._launch = direct_launch(recorded.compiled, recorded.grid)
        self._template: list[Any] = []  # values of all arguments, and of all fields of named tuples
        self._filled: list[tuple[int, int]] = []  # (place in the template, number of its address)
        self._described: list[tuple[int, int, _DescriptorMaker]] = []  # (descriptor's place, number of address, maker)
        self._records: list[tuple[int, Callable]] = []  # (place of a named tuple, function that collects its fields)

        def number_of(origin: Origin) -> int:
            return origins.setdefault(origin, len(origins))

        def add(argument: Any) -> int:
            """Add an argument to the template, without the address of a tensor; return its place in the template."""
            if isinstance(argument, Tensor):
                self._filled.append((len(self._template), number_of(recorder.origin_of(argument))))
                argument = None
            elif isinstance(argument, tuple) and _has_tensor(argument):
                fields = _picker([add(each) for each in argument])
                self._records.append((len(self._template), fields))
                argument = None
            self._template.append(argument)
            return len(self._template) - 1

        places: list[int] = []
        descriptors = iter(getattr(recorded.compiled.metadata, "tensordesc_meta", None) or ())
        for argument in recorded.arguments:
            if hasattr(argument, "block_shape"):
                maker = _DescriptorMaker(recorded.compiled, argument, next(descriptors, None))
                number = number_of(recorder.origin_of_address(argument.base.data_ptr()))
                self._described.append((len(self._template), number, maker))
                places += range(len(self._template), len(self._template) + len(maker.expanded))
                self._template += [None, *maker.expanded[1:]]
            else:
                places.append(add(argument))
        self._arguments = _picker(places)

    def run(self, stream: int, addresses: list[int]) -> None:
        """Launch the kernel on a stream, with the addresses of the tensors of this call."""
        values = self._template.copy()
        for place, number in self._filled:
            values[place] = addresses[number]
        for place, number, maker in self._described:
            values[place] = maker(addresses[number])
        for place, fields in self._records:
            values[place] = fields(values)
        self._launch(stream, self._arguments(values))


class _DescriptorMaker:
    """Encode a descriptor for TMA (the GPU's bulk copy engine), once for each address of the tensor.

    Args:
        compiled: Triton's compiled kernel.
        descriptor: the descriptor of the recorded launch.
        metadata: Triton's metadata of this parameter; None if the kernel takes the address itself.
    """

    def __init__(self, compiled: Any, descriptor: Any, metadata: Any):
        if not hasattr(descriptor.base, "_replace"):
            raise CannotReplay("a descriptor that holds its tensor")
        self._encode = sys.modules[type(compiled.run).__module__].make_tensordesc_arg
        self._descriptor, self._metadata, self._encoded = descriptor, metadata, dict[int, Any]()
        self.expanded = self._encode(descriptor, metadata)  # only the first value depends on the address

    def __call__(self, address: int) -> Any:
        """Return the encoded descriptor of the tensor at an address."""
        encoded = self._encoded.get(address)
        if encoded is None:
            if self._metadata is None:
                return address
            if len(self._encoded) >= MOST_ADDRESSES:
                self._encoded.clear()
            moved = copy.copy(self._descriptor)
            moved.base = self._descriptor.base._replace(address=address)
            encoded = self._encoded[address] = self._encode(moved, self._metadata)[0]
        return encoded


def direct_launch(compiled: Any, grid: tuple[int, int, int]) -> Callable[[int, tuple], None]:
    """Return a function of (stream, arguments) that launches a compiled kernel without Triton's Python code.

    Triton has no public function for such a launch. The returned function calls the C function of Triton 3.6 or 3.7.

    Raises:
        CannotReplay: Triton has another version, the GPU is not an NVIDIA GPU, or the kernel needs scratch memory.
    """
    launcher = getattr(compiled, "run", None)
    version = tuple(int(part) for part in triton_version().split(".")[:2])
    if version not in KNOWN_VERSIONS or type(launcher).__name__ != "CudaLauncher":
        raise CannotReplay(f"launches of Triton {triton_version()} by {type(launcher).__name__}")
    if compiled.metadata.global_scratch_size or compiled.metadata.profile_scratch_size:
        raise CannotReplay("a kernel that needs scratch memory")
    start = launcher.launch
    names = getattr(getattr(start, "__code__", None), "co_freevars", ())
    if "launcher" in names:  # take the C function out of the Python function that encodes descriptors
        start = start.__closure__[names.index("launcher")].cell_contents
    function, packed = compiled.function, compiled.packed_metadata
    kind = launcher.launch_cooperative_grid, launcher.launch_pdl
    if version == (3, 6):
        tail = (None, None, packed, None, None, None)
        return lambda stream, arguments: start(*grid, stream, function, *kind, *tail, *arguments)
    tail = (packed, None, None, None, None, None, launcher.arg_annotations, launcher.kernel_signature)
    return lambda stream, arguments: start(*grid, stream, function, *kind, *tail, arguments)


@functools.cache
def triton_version() -> str:
    """Return the version of Triton."""
    import triton

    return triton.__version__


def calls_of(hook: Any) -> Any:
    """Return the functions of a launch hook of Triton, which is a list of functions, one function or None."""
    return getattr(hook, "calls", hook)


def _flat(values: Any) -> Iterator[Any]:
    """Yield the values one after another; in place of a tuple, yield its values."""
    for each in values:
        if isinstance(each, tuple):
            yield from _flat(each)
        else:
            yield each


def _has_tensor(value: Any) -> bool:
    """Return whether a value is a tensor or a tuple with a tensor.

    Raises:
        CannotReplay: a tensor is in a list.
    """
    if isinstance(value, tuple):
        return any([_has_tensor(each) for each in value])
    if isinstance(value, list) and any(isinstance(each, Tensor) for each in value):
        raise CannotReplay("a list of tensors")
    return isinstance(value, Tensor)


def _repeated(tensors: list[Tensor]) -> list[int]:
    """Return for each tensor the first index at which the same object occurs; an empty list if no object repeats."""
    if len(set(map(id, tensors))) == len(tensors):
        return []
    first: dict[int, int] = {}
    return [first.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)]


def _picker(places: list[int]) -> Callable[[Any], tuple]:
    """Return a function that returns the values at these places of a sequence, as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple([values[place] for place in places])


def _allocation_like(tensor: Tensor) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return size and options with which `torch.empty` or `torch.zeros` allocates a tensor like this tensor.

    Raises:
        CannotReplay: the tensor is not contiguous.
    """
    if not tensor.is_contiguous():
        raise CannotReplay("a new tensor that is not contiguous")
    return tuple(tensor.shape), {"dtype": tensor.dtype, "device": tensor.device}
