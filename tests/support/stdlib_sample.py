"""Windows of the files in tests/data/stdlib_sample, text on which the model tiny-mla was not trained."""

from __future__ import annotations

from pathlib import Path

import torch

SAMPLE = Path(__file__).parents[1] / "data" / "stdlib_sample"
BOS, WINDOW = 256, 1024


def windows(per_file: int | None = None) -> torch.Tensor:
    """Return non-overlapping windows of 1024 bytes of the files in tests/data/stdlib_sample, [windows, 1024].

    Args:
        per_file: number of windows of each file; None takes all windows.
    """
    cut = []
    for path in sorted(SAMPLE.glob("*.py.txt")):
        content = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
        cut.append(content[: len(content) // WINDOW * WINDOW].view(-1, WINDOW)[:per_file])
    return torch.cat(cut)
