"""Launch a kernel again without Triton's search for the compiled kernel, outside of the replays of an op.

A replay (`replayed_calls`) repeats the calls of our own ops. The adapters to other libraries launch kernels too, before
and after the call of the library, which a replay cannot repeat. These launches are kept one by one: each has a key that
determines the compiled kernel, its grid and all its numbers, so that only the addresses of the tensors change.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from torch import Tensor

from .direct_launches import CannotReplay, direct_launch
from .repeated_launches import note_other_launch
from .replayed_calls import calls_of

MOST_KEYS = 1024  # launches kept for each kernel; each new number of tokens of a step may add one


class KeptLaunch(NamedTuple):
    """One kept launch.

    Attributes:
        start: function of (stream, arguments) that launches the compiled kernel.
        rest: the arguments after the tensors.
        device: index of the device of the tensors.
        driver: Triton's driver.
        hooks: Triton's launch hooks, such as those of a profiler.
    """

    start: Callable[[int, tuple], None]
    rest: tuple
    device: int
    driver: Any
    hooks: Any

    def again(self, tensors: tuple[Tensor, ...]) -> bool:
        """Repeat the launch with other tensors; return whether it was repeated.

        The launch is not repeated if another device is current, or if Triton has a launch hook.

        Args:
            tensors: tensors with the dtypes of the first tensors; their addresses are equal modulo 16.
        """
        start, rest, device, driver, hooks = self
        active = driver.active
        if (
            active.get_current_device() != device
            or calls_of(hooks.launch_enter_hook)
            or calls_of(hooks.launch_exit_hook)
        ):
            return False
        note_other_launch()
        start(active.get_current_stream(device), (*[each.data_ptr() for each in tensors], *rest))
        return True


class KeptLaunches:
    """The launches of one kernel.

    Args:
        kernel: Triton kernel whose first parameters are tensors. No other parameter is a tensor.
    """

    def __init__(self, kernel: Any):
        self._kernel = kernel
        self._kept: dict[Hashable, KeptLaunch] = {}

    def kept(self, key: Hashable) -> KeptLaunch | None:
        """Return the launch that `run` kept for a key; None if there is none."""
        return self._kept.get(key)

    def again(self, key: Hashable, tensors: tuple[Tensor, ...]) -> bool:
        """Repeat the launch that `run` kept for a key, with other tensors; return whether it was repeated.

        The arguments are those of `run`. If the result is False, the caller must call `run`.
        """
        kept = self._kept.get(key)
        return kept is not None and kept.again(tensors)

    def run(
        self, key: Hashable, grid: tuple[int, ...], tensors: tuple[Tensor, ...], numbers: tuple[int, ...],
        **constants: Any,
    ) -> None:  # fmt: skip
        """Launch the kernel on the current stream of the current device, and keep the launch for `again`.

        The current device must be the device of the tensors.

        Args:
            key: must differ if anything but the addresses of the tensors differs: device, grid, numbers, constants,
                dtypes of the tensors, and whether each address is a multiple of 16.
            grid: number of programs.
            tensors: values of the first parameters.
            numbers: values of the parameters after the tensors.
            constants: values of the other parameters, and launch options such as `num_warps`.
        """
        note_other_launch()
        compiled = self._kernel[grid](*tensors, *numbers, **constants)
        if key not in self._kept and hasattr(compiled, "packed_metadata"):  # Triton's interpreter compiles nothing
            self._keep(key, compiled, grid, numbers, constants, len(tensors))

    def _keep(
        self, key: Hashable, compiled: Any, grid: tuple[int, ...], numbers: tuple[int, ...], constants: dict[str, Any],
        num_tensors: int,
    ) -> None:  # fmt: skip
        """Keep a launch of the compiled kernel, with everything but the addresses of its tensors."""
        from triton import knobs
        from triton.runtime import driver

        try:
            start = direct_launch(compiled, (*grid, 1, 1)[:3])
        except CannotReplay:  # such as a new version of Triton: each launch then searches for the compiled kernel
            return
        names = self._kernel.arg_names[num_tensors + len(numbers) :]
        if len(self._kept) >= MOST_KEYS:
            self._kept.clear()
        rest = (*numbers, *[constants[name] for name in names])
        self._kept[key] = KeptLaunch(start, rest, driver.active.get_current_device(), driver, knobs.runtime)
