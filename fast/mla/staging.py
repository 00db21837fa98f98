"""Transfer of the integers of a plan to a GPU, in one copy."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def to_device(
    tensors: Mapping[str, Tensor], device: torch.device, staging: StagingBuffer | None
) -> Mapping[str, Tensor]:
    """Return int32 tensors on a device: a GPU gets all tensors in one copy, a CPU gets the tensors unchanged.

    The host does not wait for the copy.

    Args:
        tensors: int32 tensors on the CPU, by name.
        device: device of the result.
        staging: pinned memory for the copy; None takes pinned memory from PyTorch's allocator.
    """
    if device.type == "cpu" or not tensors:
        return tensors
    flat = [tensor.reshape(-1) for tensor in tensors.values()]
    sizes = [tensor.shape[0] for tensor in flat]
    if staging is not None:
        moved = staging.send(flat, device)
    else:  # PyTorch's allocator reuses pinned memory only after copies from this memory have run
        pinned = torch.empty(sum(sizes), dtype=torch.int32, device="cpu", pin_memory=True)
        moved = torch.cat(flat, out=pinned).to(device, non_blocking=True)
    parts = zip(tensors.items(), moved.split(sizes), strict=True)
    return {name: part.view(tensor.shape) for (name, tensor), part in parts}


class StagingBuffer:
    """Pinned memory through which plans are sent to a GPU, in two halves that are used alternately.

    An event guards each half: the half is written again only after the last copy from this half has run. The CPU can
    therefore plan the next step while the GPU runs the current step. The host waits only if both of the last two copies
    have not run yet. Only one thread may use a buffer.
    """

    def __init__(self):
        self._halves: dict[torch.device, list[tuple[Tensor, torch.cuda.Event]]] = {}

    def send(self, pieces: list[Tensor], device: torch.device) -> Tensor:
        """Return the given vectors, one after another, as one int32 vector on a CUDA device.

        Args:
            pieces: int32 vectors on the CPU.
            device: device of the result.
        """
        total = sum(piece.shape[0] for piece in pieces)
        halves = self._halves.setdefault(device, [])
        half, event = torch.empty(0, dtype=torch.int32, device="cpu"), torch.cuda.Event()
        if len(halves) == 2:
            half, event = halves.pop(0)
            event.synchronize()
        if half.shape[0] < total:
            half = torch.empty(2 * total, dtype=torch.int32, device="cpu", pin_memory=True)
        try:
            return torch.cat(pieces, out=half[:total]).to(device, non_blocking=True)
        finally:
            event.record(torch.cuda.current_stream(device))
            halves.append((half, event))
