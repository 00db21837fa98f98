"""Write the times of decodes over `fp8_e4m3` that `fast.backends.explain` reports, from the results of two benchmarks.

    python -m tests.benchmarks.fp8_mode_times

The command reads docs/results/h200-decode.json (caches in bfloat16) and docs/results/h200-decode-fp8.json, which
`python -m tests.benchmarks.decode` wrote, and writes fast/assets/fp8_decode_times.json. It measures nothing. Both files
must come from the same sources of `fast`: otherwise the command writes nothing, and exits with 2.

The committed file was made by `times_of_modes` from results of two runs with different sources, without this command.
The message of `explain` says so.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from fast.backends.fp8_mode_times import MANY_ROWS, PLAIN, TIMES
from reference.interfaces import CONVERTED, FP8_MODES

from ..support.commands import ROOT
from .command_line import CannotRun, run

SOURCES = {PLAIN: "docs/results/h200-decode.json", "fp8_e4m3": "docs/results/h200-decode-fp8.json"}
DIGITS = 1  # digits behind the point of a time in microseconds


def read_results() -> dict[str, dict[str, Any]]:
    """Return the contents of the files in `SOURCES`, with the same keys."""
    return {name: json.loads((ROOT / path).read_text()) for name, path in SOURCES.items()}


def check_same_sources(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise `CannotRun` if the results come from different sources of `fast`: their times cannot be divided."""
    found = {name: each["fast_sha256"] for name, each in results.items()}
    if len(set(found.values())) > 1:
        both = " and ".join(f"{found[name][:12]} ({path})" for name, path in SOURCES.items())
        raise CannotRun(f"fast_sha256: expected results of the same sources of fast, got {both}")


def times_of_modes(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the contents of `TIMES`: the replayed times for one query token of a request and at least 64 heads.

    A time is the shorter one of the times with and without a schedule. A shape that one of the files lacks is left out.
    """
    found: dict[int, dict[str, dict[str, dict[str, float]]]] = {}
    for name, each in results.items():
        names = {PLAIN: "fast"} if name == PLAIN else {mode: name_in_results(mode) for mode in FP8_MODES}
        for row in each["rows"]:
            dims, times = row["dims"], row["times"]["replayed"]
            if dims["Sq"] == 1 and dims["N"] >= MANY_ROWS:
                shape = found.setdefault(dims["N"], {}).setdefault(shape_in_words(dims), {})
                for key, form in (("times_us", ""), ("invariant_us", ", invariant")):
                    for mode, who in names.items():
                        forms = [times[each] for each in (who + form, f"{who}{form}, planned") if each in times]
                        if forms:  # the modes with queries in e4m3 may have no batch-invariant times
                            least = min(time["median_us"] for time in forms)
                            shape.setdefault(key, {})[mode] = round(least, DIGITS)
    (gpu,) = {each["gpu"] for each in results.values()}
    return {
        "runs": {
            name: {"file": SOURCES[name], "date": each["date"], "fast_sha256": each["fast_sha256"]}
            for name, each in results.items()
        },
        "gpu": gpu,
        "rows": [
            {
                "rows": rows,
                "shapes": [
                    {"shape": shape, **times}
                    for shape, times in found[rows].items()
                    if {PLAIN, CONVERTED} <= times["times_us"].keys()
                ],
            }
            for rows in sorted(found)
        ],
    }


def shape_in_words(dims: Mapping[str, Any]) -> str:
    """Return the number of requests and of keys of a row in words."""
    if dims["B"] == 1:
        return f"one request of {dims['S']} keys"
    lens = "" if dims["lens"] == "equal" else "up to "
    return f"{dims['B']} requests of {lens}{dims['S']} keys"


def name_in_results(mode: str) -> str:
    """Return the name of a mode in the results of `python -m tests.benchmarks.decode --cache-format fp8_e4m3`."""
    return "fast" if mode == CONVERTED else f"fast, {mode}"


def main(argv: Sequence[str] | None = None) -> int:
    """Write `TIMES` and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.fp8_mode_times",
        description=__doc__.splitlines()[0],
        epilog="Exit status: 0 on success, 2 if the results come from different sources of fast.",
    )

    def write(*_: Any) -> int:
        results = read_results()
        check_same_sources(results)
        TIMES.write_text(json.dumps(times_of_modes(results), indent=1) + "\n")
        return 0

    return run(write, argv, parser)


if __name__ == "__main__":
    raise SystemExit(main())
