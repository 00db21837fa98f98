"""Check that a device exists before backends are asked for its compute capability."""

from __future__ import annotations

import torch

from reference.interfaces import check


def check_present_device(argument: str, device: torch.device) -> None:
    """Raise if torch does not see a CUDA device.

    Args:
        argument: name of the argument, for the error.
        device: the device; every device that is not of the type "cuda" passes.

    Raises:
        ValueError: torch has no such CUDA device, or no CUDA at all.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return
    try:
        torch.cuda.get_device_capability(device)
    except (AssertionError, RuntimeError):  # torch without CUDA, no driver, or an index that is too large
        present = torch.cuda.device_count()
        check(False, argument, f"another device, or one of the {present} CUDA devices that torch sees", device)
