"""Write the times of decodes over `fp8_e4m3` that `fast.backends.explain` reports, from the results of two benchmarks.

    python -m tests.benchmarks.fp8_mode_times

The command reads docs/results/h200-decode.json (caches in bfloat16) and docs/results/h200-decode-fp8.json, which
`python -m tests.benchmarks.decode` wrote, and writes fast/assets/fp8_decode_times.json. It measures nothing.
"""

from __future__ import annotations

import json
from typing import Any

from fast.backends.fp8_mode_times import MANY_ROWS, PLAIN, TIMES
from reference.interfaces import CONVERTED, FP8_MODES

from ..support.commands import ROOT

SOURCES = {PLAIN: "docs/results/h200-decode.json", "fp8_e4m3": "docs/results/h200-decode-fp8.json"}
REQUESTS, KEYS = 128, 4096  # the shape whose times are written
DIGITS = 1  # digits behind the point of a time in microseconds


def times_of_modes() -> dict[str, Any]:
    """Return the contents of `TIMES`: the replayed times of `SOURCES` for one query token and at least 64 heads."""
    found: dict[int, dict[str, float]] = {}
    gpus = set()
    for name, path in SOURCES.items():
        results = json.loads((ROOT / path).read_text())
        gpus.add(results["gpu"])
        names = {PLAIN: "fast"} if name == PLAIN else {mode: name_in_results(mode) for mode in FP8_MODES}
        for row in results["rows"]:
            dims = row["dims"]
            if (dims["B"], dims["S"], dims["Sq"], dims["lens"]) == (REQUESTS, KEYS, 1, "equal"):
                times = row["times"]["replayed"]
                found.setdefault(dims["N"], {}).update(
                    {mode: round(times[who]["median_us"], DIGITS) for mode, who in names.items()}
                )
    (gpu,) = gpus
    return {
        "sources": list(SOURCES.values()),
        "gpu": gpu,
        "shape": f"{REQUESTS} requests of {KEYS} keys",
        "rows": [{"rows": rows, "times_us": found[rows]} for rows in sorted(found) if rows >= MANY_ROWS],
    }


def name_in_results(mode: str) -> str:
    """Return the name of a mode in the results of `python -m tests.benchmarks.decode --cache-format fp8_e4m3`."""
    return "fast" if mode == CONVERTED else f"fast, {mode}"


if __name__ == "__main__":
    TIMES.write_text(json.dumps(times_of_modes(), indent=1) + "\n")
