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
    pairs = zip(tensors.items(), moved.split(sizes), strict=True)
    return {name: sent.view(tensor.shape) for (name, tensor), sent in pairs}


class StagingBuffer:
    """Pinned memory through which plans are sent to a GPU; the host never waits for the GPU.

    The memory consists of vectors, each with a CUDA event that is recorded after the last copy from the vector. A plan
    uses a vector whose copy has finished. If every vector still has a running copy, the buffer allocates a new vector.
    Only one thread may use a buffer.
    """

    def __init__(self):
        self._pinned: dict[torch.device, list[tuple[Tensor, torch.cuda.Event]]] = {}

    def send(self, vectors: list[Tensor], device: torch.device) -> Tensor:
        """Concatenate vectors in pinned memory, and return them as one int32 vector on a CUDA device.

        Args:
            vectors: int32 vectors on the CPU.
            device: device of the result.
        """
        total = sum(vector.shape[0] for vector in vectors)
        pinned = self._pinned.setdefault(device, [])
        free = next((number for number, (_, event) in enumerate(pinned) if event.query()), None)
        memory, event = (None, torch.cuda.Event()) if free is None else pinned.pop(free)
        with torch.inference_mode(False):  # a later step may reuse the memory outside of inference mode
            if memory is None or memory.shape[0] < total:
                memory = torch.empty(2 * total, dtype=torch.int32, device="cpu", pin_memory=True)
            try:
                return torch.cat(vectors, out=memory[:total]).to(device, non_blocking=True)
            finally:
                event.record(torch.cuda.current_stream(device))
                pinned.append((memory, event))
