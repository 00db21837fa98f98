"""Properties of a device that launchers need; they are read once for each device."""

from __future__ import annotations

import contextlib
import functools
from typing import NamedTuple

import torch
from torch import Tensor

_SAME_DEVICE = contextlib.nullcontext()


class DeviceFacts(NamedTuple):
    """Properties of a GPU, or of Triton's interpreter.

    Attributes:
        processors: number of multiprocessors (SMs).
        capability: (major, minor) compute capability of an NVIDIA GPU; (0, 0) on ROCm, where the numbers have another
            meaning.
        shared: bytes of shared memory that a program may use.
        interpreted: True for Triton's interpreter, which runs kernels on the CPU.
    """

    processors: int
    capability: tuple[int, int]
    shared: int
    interpreted: bool = False

    @property
    def has_copy_engine(self) -> bool:
        """Whether the GPU has TMA (a bulk copy engine), so that kernels can load tiles with tensor descriptors."""
        return self.capability >= (9, 0)

    @property
    def has_dependent_launch(self) -> bool:
        """Whether a kernel can start before the preceding kernel has ended, and later wait for this end."""
        return self.capability >= (9, 0) and not self.interpreted

    @property
    def following(self) -> dict[str, bool]:
        """Launch options that let a kernel start before the preceding kernel has ended, if the GPU supports this.

        A kernel with DEPENDENT=True waits for the preceding kernel before it reads data.
        """
        return {"DEPENDENT": True, "launch_pdl": True} if self.has_dependent_launch else {"DEPENDENT": False}


@functools.cache
def device_facts(device: torch.device) -> DeviceFacts:
    """Return the properties of a device.

    Triton's interpreter is described as a small Hopper GPU. Where a kernel has a branch for Hopper, the interpreter
    therefore runs this branch.
    """
    if device.type != "cuda":
        return DeviceFacts(processors=4, capability=(9, 0), shared=232448, interpreted=True)
    found = torch.cuda.get_device_properties(device)
    capability = (found.major, found.minor) if torch.version.hip is None else (0, 0)  # an MI300 reports (9, 4)
    return DeviceFacts(found.multi_processor_count, capability, found.shared_memory_per_block_optin)


def device_of(tensor: Tensor) -> contextlib.AbstractContextManager:
    """Return `torch.cuda.device_of(tensor)`, or a context that does nothing if the device is current already."""
    index = tensor.get_device()
    if index < 0 or index == torch.cuda.current_device():
        return _SAME_DEVICE
    return torch.cuda.device_of(tensor)
