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
    """Pinned memory through which plans are sent to a GPU; the host never waits for the GPU.

    The memory has one part for each plan that is on its way. An event tells whether the last copy from a part has run.
    A plan takes a part whose copy has run; if there is none, it takes a new part. So there are as many parts as the
    host is steps ahead of the GPU. Only one thread may use a buffer.
    """

    def __init__(self):
        self._parts: dict[torch.device, list[tuple[Tensor, torch.cuda.Event]]] = {}

    def send(self, pieces: list[Tensor], device: torch.device) -> Tensor:
        """Return the given vectors, one after another, as one int32 vector on a CUDA device.

        Args:
            pieces: int32 vectors on the CPU.
            device: device of the result.
        """
        total = sum(piece.shape[0] for piece in pieces)
        parts = self._parts.setdefault(device, [])
        free = next((number for number, (_, event) in enumerate(parts) if event.query()), None)
        part, event = (None, torch.cuda.Event()) if free is None else parts.pop(free)
        with torch.inference_mode(False):  # later steps may run outside of the inference mode of this step
            if part is None or part.shape[0] < total:
                part = torch.empty(2 * total, dtype=torch.int32, device="cpu", pin_memory=True)
            try:
                return torch.cat(pieces, out=part[:total]).to(device, non_blocking=True)
            finally:
                event.record(torch.cuda.current_stream(device))
                parts.append((part, event))
