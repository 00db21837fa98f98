"""Costs of arithmetic and memory traffic, from which `choose_path` estimates the times of two attention paths.

The absorbed path attends the cached latents themselves. The expanded path first computes keys and values of every head
from the latents, with the up-projections W_UK and W_UV.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from .checks import check, check_number

FLOPS_PER_BYTE = 200  # FLOPs in the time of moving one byte: a round number, not measured on a device


@dataclass(frozen=True)
class PathCosts:
    """Costs of the absorbed and the expanded path, from which `choose_path` estimates their times.

    All costs must have the same unit of time; `choose_path` compares times, so any unit is valid. The defaults are not
    measured: every FLOP costs 1, and a byte costs `FLOPS_PER_BYTE`. `python -m tests.benchmarks.crossover` measures the
    costs on a device.

    Attributes:
        absorbed_request: fixed cost of a request on the absorbed path, which does not depend on lengths.
        expanded_request: fixed cost of a request on the expanded path, which does not depend on lengths.
        expanded_context: fixed cost that a request on the expanded path has in addition if it has cached tokens.
        absorbed_flop: cost of a FLOP of attention over latents.
        expanded_flop: cost of a FLOP of attention over expanded keys and values.
        projection_flop: cost of a FLOP of the up-projections W_UK and W_UV, on both paths.
        byte: cost of moving one byte.

    Raises:
        ValueError: a cost is negative or not a finite number.
    """

    absorbed_request: float = 0.0
    expanded_request: float = 0.0
    expanded_context: float = 0.0
    absorbed_flop: float = 1.0
    expanded_flop: float = 1.0
    projection_flop: float = 1.0
    byte: float = float(FLOPS_PER_BYTE)

    def __post_init__(self):
        for field in fields(self):
            check_number(field.name, getattr(self, field.name), 0)

    def save(self, path: Path | str) -> None:
        """Write the costs to a JSON file."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> PathCosts:
        """Read the costs from a JSON file that `save` wrote.

        Raises:
            ValueError: the file has other fields, or a value that is not a number.
        """
        values = json.loads(Path(path).read_text())
        names = [field.name for field in fields(cls)]
        given = sorted(values) if isinstance(values, dict) else type(values).__name__
        check(given == sorted(names), "path", f"a file with {', '.join(names)}", given)
        return cls(**values)
