"""Functions for the command lines of all benchmarks: options and their checks, errors, console, results file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console


class CannotRun(Exception):
    """Error of a benchmark that cannot run here; the message gives the reason in one line."""


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line, or the name of its class if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__


def run(
    run_main: Callable[[Sequence[str], argparse.Namespace], int],
    argv: Sequence[str] | None,
    parser: argparse.ArgumentParser,
) -> int:
    """Parse the options of a benchmark, run the benchmark, and return its exit status.

    Args:
        run_main: function that gets the unparsed and the parsed options, and returns the exit status.
        argv: options of the command line; None takes the options of this process.
        parser: parser of the options.

    Returns:
        The exit status of `run_main`, or 2 after one line on stderr if the benchmark cannot run here.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(argv)
    try:
        return run_main(argv, arguments)
    except (CannotRun, ValueError, torch.cuda.OutOfMemoryError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2


def make_parser(name: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of a benchmark that times a layer: device, heads, backend, results file.

    Args:
        name: name of the benchmark's module.
        description: one line for the help.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.benchmarks.{name}", description=description,
        epilog="Exit status: 0 on success, 2 if the benchmark cannot run here.",
    )  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="device (default: cuda)")
    parser.add_argument("--heads", type=int, metavar="N", help="number of heads (default: as in the config)")
    parser.add_argument("--backend", metavar="NAME", help="backend of fast (default: chosen for the device)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for hardware, versions and times")
    return parser


def check_device(device: str) -> None:
    """Raise `CannotRun` if the device is "cuda" and there is no GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        raise CannotRun("needs a CUDA device, and torch sees none")


def check_peers(folder: Path | None) -> None:
    """Raise `CannotRun` if a folder is given and has no module peers.py (kernels of other projects)."""
    if folder is not None and not (folder / "peers.py").is_file():
        raise CannotRun(f"--peers: expected a folder with peers.py, got {folder}")


def check_at_least_one(arguments: argparse.Namespace, *names: str) -> None:
    """Raise `CannotRun` if one of the options `names` is given and is below 1."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise CannotRun(f"--{name}: expected at least 1, got {value}")


def wide_console(width: int) -> Console:
    """Return a console; it has at least `width` columns if stdout is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, width))


def write_report(path: Path, report: Mapping[str, Any], console: Console | None = None) -> None:
    """Write a results file, and print its path if a console is given."""
    path.write_text(json.dumps(report, indent=1) + "\n")
    if console is not None:
        console.print(f"figures: {path}", markup=False)
