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
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .direct_launches import CannotReplay, direct_call
from .replay_code import Code, differ, tuple_of

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


class Recorder(TorchDispatchMode):
    """Watch one call: while this dispatch mode is active, record each allocation, each view and each other op of torch.

    Args:
        arguments: arguments of the call.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not import its compiler; under the compiler no call is recorded."""
        return False

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

    Attributes:
        run: function that gets the arguments of a call by position. It allocates tensors, launches the kernels and
            returns the result. It returns MISFIT if the host code of the op must run:

            - an argument that is not a tensor has another value than in the recorded call;
            - two arguments are the same tensor object, but were different objects in the recorded call, or the reverse;
            - another device is current;
            - Triton has a launch hook, for example of a profiler.

    Raises:
        CannotReplay: the call did something other than allocate tensors and launch kernels.
    """

    def __init__(self, recorder: Recorder, arguments: tuple, result: Any):
        from triton import knobs
        from triton.runtime import driver

        if recorder.other_op is not None or not recorder.launches:
            raise CannotReplay(recorder.other_op or "a call without a launch")
        self._allocations = [
            Allocation(torch.zeros if zeroed else torch.empty, *_allocation_like(tensor))
            for tensor, zeroed in zip(recorder.allocations, recorder.zeroed, strict=True)
        ]
        self._launches = [_ReplayedLaunch(each, recorder) for each in recorder.launches]
        device = driver.active.get_current_device()
        devices = {each.get_device() for each in (*recorder.inputs, *recorder.allocations)}
        if not devices <= {-1, device}:  # -1 is the CPU
            raise CannotReplay("tensors on a device that is not the current one")
        results = result if isinstance(result, tuple) else (result,)
        places = [None if each is None else recorder.place_of_result(each) for each in results]
        code, parameters = Code(), [f"a{number}" for number in range(len(arguments))]
        tensors = self._write_checks(code, parameters, arguments, recorder.repeated_inputs(), driver, knobs, device)
        kinds = [(each.dtype, each.device) for each in recorder.inputs]
        for number, allocation in enumerate(self._allocations):
            code.add(f"n{number} = {_allocated(code, allocation, tensors, kinds)}")
            tensors.append(f"n{number}")
        addresses: dict[Origin, str] = {}
        for each in self._launches:
            each.write(code, addresses, tensors, len(recorder.inputs))
        names = ["None" if place is None else tensors[place] for place in places]
        code.add(f"return {tuple_of(names) if isinstance(result, tuple) else names[0]}")
        self.run = code.function(parameters)

    @staticmethod
    def _write_checks(code, parameters, arguments, repeated, driver, knobs, device) -> list[str]:
        """Write the cases in which the host code must run, and the current stream; return the names of the inputs."""
        unpacked, tensors, values, expected = [], [], [], []
        for name, argument in zip(parameters, arguments, strict=True):
            if not _has_tensor(argument):
                values.append(name)
                expected.append(argument)
            elif isinstance(argument, tuple):
                unpacked.append(f"{_unpacked(name, argument, tensors)} = {name}")
            else:
                tensors.append(name)
        runtime, current, index = code.value(knobs.runtime), code.value(driver), code.value(device)
        cases = [f"{tuple_of(values)} != {code.value(tuple(expected))}"] if values else []
        cases += [each for each in (differ(tensors, repeated),) if each is not None]
        cases.append(f"active.get_current_device() != {index}")
        cases += [f'getattr({hook}, "calls", {hook})' for hook in ("enter", "leave")]
        for line in unpacked:
            code.add(line)
        code.add(f"active, enter, leave = {current}.active, {runtime}.launch_enter_hook, {runtime}.launch_exit_hook")
        code.add(f"if {' or '.join(cases)}:")
        code.add(f"    return {code.value(MISFIT)}")
        code.add(f"stream = active.get_current_stream({index})")
        return tensors


class _ReplayedLaunch:
    """One launch of a replay.

    Args:
        recorded: the recorded launch.
        recorder: record of the call.
    """

    def __init__(self, recorded: Launch, recorder: Recorder):
        self._call = direct_call(recorded.compiled, recorded.grid)
        self._arguments: list[Any] = []  # an address is an `Origin`, a descriptor is a `_Described`
        descriptors = iter(getattr(recorded.compiled.metadata, "tensordesc_meta", None) or ())

        def without_tensors(argument: Any) -> Any:
            """Return an argument, with the origin of the address in place of each tensor."""
            if isinstance(argument, Tensor):
                return recorder.origin_of(argument)
            if isinstance(argument, tuple) and _has_tensor(argument):
                return _Fields(without_tensors(each) for each in argument)
            return argument

        for argument in recorded.arguments:
            if hasattr(argument, "block_shape"):
                maker = _DescriptorMaker(recorded.compiled, argument, next(descriptors, None))
                origin = recorder.origin_of_address(argument.base.data_ptr())
                self._arguments += [_Described(origin, maker), *maker.expanded[1:]]
            else:
                self._arguments.append(without_tensors(argument))

    def write(self, code: Code, addresses: dict[Origin, str], tensors: list[str], inputs: int) -> None:
        """Write the launch, with the addresses of the tensors of this call.

        Args:
            code: receives the lines.
            addresses: mapping from an origin to the name of its address; the launch adds its own origins.
            tensors: names of the inputs and of the new tensors.
            inputs: number of inputs.
        """

        def address_of(origin: Origin) -> str:
            if origin not in addresses:
                addresses[origin] = f"p{len(addresses)}"
                shift = f" + {code.value(origin.offset)}" if origin.offset else ""
                code.add(f"{addresses[origin]} = {tensors[origin.place + inputs * origin.new]}.data_ptr(){shift}")
            return addresses[origin]

        def written(argument: Any) -> str:
            if isinstance(argument, Origin):
                return address_of(argument)
            if isinstance(argument, _Described):
                address, name = address_of(argument.origin), code.value(argument.maker.encoded)
                code.add(f"d{name} = {name}.get({address})")
                code.add(f"if d{name} is None:")
                code.add(f"    d{name} = {code.value(argument.maker)}({address})")
                return f"d{name}"
            if isinstance(argument, _Fields):
                return tuple_of([written(each) for each in argument])
            return code.value(argument)

        given = [written(each) for each in self._arguments]
        call = self._call
        first, last = ([code.value(each) for each in part] for part in (call.grid, call.constants))
        given = [tuple_of(given)] if call.in_one_tuple else given
        code.add(f"{code.value(call.start)}({', '.join([*first, 'stream', *last, *given])})")


class _Fields(tuple):
    """The fields of a named tuple that has tensors, with an `Origin` in place of each tensor."""

    __slots__ = ()


class _DescriptorMaker:
    """Encode a descriptor for TMA (the GPU's bulk copy engine), once for each address of the tensor.

    Args:
        compiled: Triton's compiled kernel.
        descriptor: the descriptor of the recorded launch.
        metadata: Triton's metadata of this parameter; None if the kernel takes the address itself.

    Attributes:
        encoded: the encoded descriptors by address.
        expanded: all values that the kernel gets for the recorded descriptor.
    """

    def __init__(self, compiled: Any, descriptor: Any, metadata: Any):
        if not hasattr(descriptor.base, "_replace"):
            raise CannotReplay("a descriptor that holds its tensor")
        self._encode = sys.modules[type(compiled.run).__module__].make_tensordesc_arg
        self._descriptor, self._metadata, self.encoded = descriptor, metadata, dict[int, Any]()
        self.expanded = self._encode(descriptor, metadata)  # only the first value depends on the address

    def __call__(self, address: int) -> Any:
        """Return the encoded descriptor of the tensor at an address."""
        encoded = self.encoded.get(address)
        if encoded is None:
            if self._metadata is None:
                return address
            if len(self.encoded) >= MOST_ADDRESSES:
                self.encoded.clear()
            moved = copy.copy(self._descriptor)
            moved.base = self._descriptor.base._replace(address=address)
            encoded = self.encoded[address] = self._encode(moved, self._metadata)[0]
        return encoded


class _Described(NamedTuple):
    """A descriptor among the arguments of a launch: the origin of its address, and the object that encodes it."""

    origin: Origin
    maker: _DescriptorMaker


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


def _unpacked(name: str, values: tuple, tensors: list[str]) -> str:
    """Return the names of the values of a tuple, as source to assign them; append the names of tensors to `tensors`."""
    names = []
    for number, value in enumerate(values):
        own = f"{name}_{number}"
        if isinstance(value, tuple) and _has_tensor(value):
            own = _unpacked(own, value, tensors)
        elif isinstance(value, Tensor):
            tensors.append(own)
        names.append(own)
    return tuple_of(names)


def _allocated(code: Code, allocation: Allocation, inputs: list[str], kinds: list[tuple]) -> str:
    """Return the source of an allocation.

    Args:
        code: receives the values.
        allocation: the allocation.
        inputs: names of the inputs.
        kinds: dtype and device of each input. The method of an input with both takes less time than `torch.empty`.
    """
    size = code.value(allocation.size)
    kind = tuple(allocation.options.values())
    if kind in kinds:
        return f"{inputs[kinds.index(kind)]}.new_{allocation.allocate.__name__}({size})"
    given = "".join(f", {name}={code.value(option)}" for name, option in allocation.options.items())
    return f"{code.value(allocation.allocate)}({size}{given})"


def _allocation_like(tensor: Tensor) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return size and options with which `torch.empty` or `torch.zeros` allocates a tensor like this tensor.

    Raises:
        CannotReplay: the tensor is not contiguous.
    """
    if not tensor.is_contiguous():
        raise CannotReplay("a new tensor that is not contiguous")
    return tuple(tensor.shape), {"dtype": tensor.dtype, "device": tensor.device}
