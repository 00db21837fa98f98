"""Send the integers of a plan to a GPU: one copy for all of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def to_device(
    tensors: Mapping[str, Tensor], device: torch.device, staging: StagingBuffer | None
) -> Mapping[str, Tensor]:
    """Return int32 tensors on a device, by one copy that the host does not wait for; on a CPU as they are.

    Args:
        tensors: int32 on the CPU, by name.
        device: device of the result.
        staging: pinned memory for the copy; None takes it from PyTorch's allocator.
    """
    if device.type == "cpu" or not tensors:
        return tensors
    flat = [tensor.reshape(-1) for tensor in tensors.values()]
    sizes = [tensor.shape[0] for tensor in flat]
    if staging is not None:
        moved = staging.send(flat, device)
    else:  # the allocator keeps pinned memory from being handed out again before its copy has run
        pinned = torch.empty(sum(sizes), dtype=torch.int32, device="cpu", pin_memory=True)
        moved = torch.cat(flat, out=pinned).to(device, non_blocking=True)
    parts = zip(tensors.items(), moved.split(sizes), strict=True)
    return {name: part.view(tensor.shape) for (name, tensor), part in parts}


class StagingBuffer:
    """Pinned memory that is used again and again to send plans to a GPU, two steps at a time.

    An event guards each half: it is written again only after the copy out of it has run. So the next step is planned
    while this one runs, and nobody waits unless two plans are under way. For one thread.
    """

    def __init__(self):
        self._halves: dict[torch.device, list[tuple[Tensor, torch.cuda.Event]]] = {}

    def send(self, pieces: list[Tensor], device: torch.device) -> Tensor:
        """The pieces one after another in one int32 vector on a CUDA device.

        Args:
            pieces: vectors of int32 on the CPU.
            device: where to.
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
