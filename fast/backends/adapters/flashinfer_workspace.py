"""The workspace of FlashInfer: memory for partial outputs, given by the caller or allocated by a builder.

A builder of the backends `flashinfer`, `flashinfer_mla` and `trtllm_ragged` takes the option `workspace` of
`backend_options`: a size in bytes, or a tensor. Without the option, the environment variable of vLLM sets the size.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from reference.interfaces import check, check_int, check_type

WORKSPACE_VARIABLE = "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE"
WORKSPACE_SIZE = 394 * 2**20  # in bytes, as vLLM's buffer, if neither an argument nor the variable sets a size
ALIGNMENT = 16  # FlashInfer divides the workspace into aligned parts


def workspace_bytes(given: int | None = None) -> int:
    """Return the size in bytes of FlashInfer's workspace: `given`, or the value of `WORKSPACE_VARIABLE`, or a default.

    Raises:
        ValueError: `given` is below 1, or the variable is not a positive number.
    """
    if given is not None:
        check_int("workspace_bytes", given, 1)
        return given
    text = os.environ.get(WORKSPACE_VARIABLE, "")
    if not text:
        return WORKSPACE_SIZE
    check(text.isdecimal() and len(text) < 19 and int(text) > 0, WORKSPACE_VARIABLE, "a number of bytes, at least 1",
          repr(text))  # fmt: skip
    return int(text)


def check_workspace(name: str, given: object) -> None:
    """Check the option `workspace` of a builder, as far as no device is known.

    Args:
        name: name of the option, for the error.
        given: size in bytes; or a contiguous uint8 vector whose address is a multiple of `ALIGNMENT`.

    Raises:
        TypeError: `given` is neither an int nor a tensor.
        ValueError: the size is below 1, or the tensor is not such a vector, or is empty.
    """
    if not isinstance(given, Tensor):
        check_type(name, given, int, "a size in bytes or a uint8 tensor")
        check_int(name, given, 1, "a size in bytes of at least 1, or a uint8 tensor")
        return
    vector = given.dtype == torch.uint8 and given.dim() == 1 and given.is_contiguous()
    check(vector, name, "a contiguous uint8 vector", f"{given.dtype} of shape {list(given.shape)}")
    check(given.numel() > 0, name, "at least 1 byte", 0)
    check(given.data_ptr() % ALIGNMENT == 0, name, f"an address that is a multiple of {ALIGNMENT}", given.data_ptr())


def new_workspace(device: torch.device, given: int | Tensor | None = None) -> Tensor:
    """Return the workspace of a builder on a device, uint8.

    Args:
        device: device of the plans.
        given: size in bytes; or the workspace itself; None takes the size from the environment.

    Raises:
        ValueError: the given workspace is on another device.
    """
    if isinstance(given, Tensor):
        index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
        same = given.device.type == device.type and given.device.index == index
        check(same, "workspace", f"a tensor on {device}, the device of the plans", str(given.device))
        return given
    return torch.empty(workspace_bytes(given), dtype=torch.uint8, device=device)


@contextlib.contextmanager
def too_small_workspace(workspace: Tensor) -> Iterator[None]:
    """Raise an error with the name of the workspace if FlashInfer finds it too small for a plan.

    Args:
        workspace: the workspace.

    Raises:
        ValueError: FlashInfer's allocator, which divides the workspace, has run out of memory.
    """
    try:
        yield
    except RuntimeError as error:
        text = " ".join(str(error).split())
        if "AlignedAllocator" not in text:
            raise
        reason = f"expected more memory for this step, got {workspace.numel()} bytes (FlashInfer: {text})"
        raise ValueError(f"workspace: {reason}") from error
