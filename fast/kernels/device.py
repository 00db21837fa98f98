"""What launches depend on besides their arguments: facts of the device, asked once."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


class DeviceFacts(NamedTuple):
    """Of a GPU, or of Triton's interpreter.

    Attributes:
        processors: how many multiprocessors.
        capability: major and minor of an NVIDIA GPU; (0, 0) on ROCm, whose numbers mean other chips.
        shared: bytes of shared memory that a program may have.
        interpreted: no GPU at all.
    """

    processors: int
    capability: tuple[int, int]
    shared: int
    interpreted: bool = False

    @property
    def has_copy_engine(self) -> bool:
        """Tiles can be fetched by tensor descriptors."""
        return self.capability >= (9, 0)

    @property
    def has_dependent_launch(self) -> bool:
        """A kernel can begin while the one before ends, and wait for it."""
        return self.capability >= (9, 0) and not self.interpreted

    @property
    def following(self) -> dict[str, bool]:
        """Options of a launch whose kernel waits for the one before where its constant DEPENDENT says so."""
        return {"DEPENDENT": True, "launch_pdl": True} if self.has_dependent_launch else {"DEPENDENT": False}


@functools.cache
def device_facts(device: torch.device) -> DeviceFacts:
    """Of a GPU; the interpreter passes for a small Hopper, so that it walks the same branches."""
    if device.type != "cuda":
        return DeviceFacts(processors=4, capability=(9, 0), shared=232448, interpreted=True)
    found = torch.cuda.get_device_properties(device)
    capability = (found.major, found.minor) if torch.version.hip is None else (0, 0)  # an MI300 says (9, 4)
    return DeviceFacts(found.multi_processor_count, capability, found.shared_memory_per_block_optin)
