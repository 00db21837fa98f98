"""What work costs: the constants that `choose_path` compares the two paths by."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from .checks import check, check_number

FLOPS_PER_BYTE = 200  # what a card of today computes in bfloat16 while it reads one byte (H100, H200, B200: 150 to 300)


@dataclass(frozen=True)
class PathCosts:
    """Costs of the two paths through attention, all in one unit of time; the unit itself does not matter.

    The defaults are counted, not measured: one FLOP costs 1 wherever it is spent, a byte as much as `FLOPS_PER_BYTE`.
    `python -m tests.benchmarks.crossover` measures them on a device.

    Attributes:
        absorbed_request: of one more request on the absorbed path, whatever its lengths.
        expanded_request: of one more on the expanded path.
        expanded_context: besides, where it has cached context, which is gathered and attended apart.
        absorbed_flop: a FLOP of attention over latents.
        expanded_flop: a FLOP of attention over expanded keys and values.
        projection_flop: a FLOP of the up-projections, of queries and outputs or of keys and values.
        byte: moving one byte.
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
        """Write the constants as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> PathCosts:
        """Read what `save` wrote.

        Raises:
            ValueError: other fields than these, or a value that is no number.
        """
        values = json.loads(Path(path).read_text())
        names = [field.name for field in fields(cls)]
        given = sorted(values) if isinstance(values, dict) else type(values).__name__
        check(given == sorted(names), "path", f"a file with {', '.join(names)}", given)
        return cls(**values)
