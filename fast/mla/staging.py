"""Transfer of a plan to a GPU in one copy; a plan is the set of int32 tensors that one step of an engine needs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def to_device(
    tensors: Mapping[str, Tensor], device: torch.device, staging: StagingBuffer | None
) -> Mapping[str, Tensor]:
    """Send int32 tensors to a GPU in one copy, without waiting for the copy; if `device` is a CPU, return them.

    Args:
        tensors: int32 tensors on the CPU, by name.
        device: device of the result.
        staging: pinned memory for the copy; None means new pinned memory from PyTorch's allocator.

    Returns:
        The tensors on `device`, by name.
    """
    if device.type == "cpu" or not tensors:
        return tensors
    flat = [tensor.reshape(-1) for tensor in tensors.values()]
    sizes = [tensor.shape[0] for tensor in flat]
    if staging is not None:
        moved = staging.send(flat, device)
    else:  # the allocator does not reuse pinned memory before copies from it have finished
        pinned = torch.empty(sum(sizes), dtype=torch.int32, device="cpu", pin_memory=True)
        moved = torch.cat(flat, out=pinned).to(device, non_blocking=True)
    parts = zip(tensors.items(), moved.split(sizes), strict=True)
    return {name: part.view(tensor.shape) for (name, tensor), part in parts}


class StagingBuffer:
    """Pinned memory through which plans are sent to a GPU; the host never waits for the GPU.

    The memory consists of parts, each with a CUDA event that is recorded after the last copy from the part. A plan uses
    a part whose copy has finished. If every part still has a running copy, the buffer allocates a new part. Only one
    thread may use a buffer.
    """

    def __init__(self):
        self._parts: dict[torch.device, list[tuple[Tensor, torch.cuda.Event]]] = {}

    def send(self, vectors: list[Tensor], device: torch.device) -> Tensor:
        """Concatenate vectors in pinned memory, and return them as one int32 vector on a CUDA device.

        Args:
            vectors: int32 vectors on the CPU.
            device: device of the result.
        """
        total = sum(vector.shape[0] for vector in vectors)
        parts = self._parts.setdefault(device, [])
        free = next((number for number, (_, event) in enumerate(parts) if event.query()), None)
        part, event = (None, torch.cuda.Event()) if free is None else parts.pop(free)
        with torch.inference_mode(False):  # a later step may reuse the memory outside of inference mode
            if part is None or part.shape[0] < total:
                part = torch.empty(2 * total, dtype=torch.int32, device="cpu", pin_memory=True)
            try:
                return torch.cat(vectors, out=part[:total]).to(device, non_blocking=True)
            finally:
                event.record(torch.cuda.current_stream(device))
                parts.append((part, event))
