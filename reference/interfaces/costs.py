"""Costs of arithmetic and memory traffic, from which times are estimated: of two attention paths, and of a cascade.

The absorbed path attends the cached latents themselves. The expanded path first computes keys and values of every head
from the latents, with the up-projections W_UK and W_UV.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from .checks import check, check_int, check_number, check_type


@dataclass(frozen=True)
class PathCosts:
    """Costs of the absorbed and the expanded path, from which `choose_path` estimates their times.

    All costs must have the same unit of time; `choose_path` compares times, so any unit is valid. The defaults are not
    measured: every FLOP costs 1, and moving a byte costs as much as 200 FLOPs, a round number.
    `python -m tests.benchmarks.crossover` measures the costs on a device.

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
    byte: float = 200.0

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


@dataclass(frozen=True)
class CascadeCosts:
    """Costs from which `use_cascade_attention` and `use_gqa_cascade_attention` estimate the times of a decode.

    The unit of time is one FLOP. The defaults are round numbers that were not measured on any hardware. The builders of
    `fast` pass the costs of their device.

    Attributes:
        flops_per_byte: number of FLOPs that a device computes in the time in which it moves one byte.
        kernel_bytes: fixed time of a kernel, for example of its launch, as the number of bytes that a device moves in
            this time. `use_cascade_attention` counts no kernels, so only `use_gqa_cascade_attention` uses this field.

    Raises:
        ValueError: `flops_per_byte` is below 1, or `kernel_bytes` is negative.
    """

    flops_per_byte: int = 200
    kernel_bytes: int = 0

    def __post_init__(self):
        check_int("flops_per_byte", self.flops_per_byte)
        check_int("kernel_bytes", self.kernel_bytes, 0)


NEUTRAL_CASCADE_COSTS = CascadeCosts()


def check_cascade_costs(costs: CascadeCosts | None, name: str = "costs") -> CascadeCosts:
    """Return `costs`, or the defaults of `CascadeCosts` if `costs` is None.

    Raises:
        TypeError: `costs` is neither a `CascadeCosts` nor None.
    """
    check_type(name, costs, (CascadeCosts, type(None)), "a CascadeCosts or None")
    return NEUTRAL_CASCADE_COSTS if costs is None else costs
