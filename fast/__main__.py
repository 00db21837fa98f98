"""The main job: serve a real checkpoint through both wings, compare them with each other and with transformers.

With no options it serves eight prompts with the small checkpoint of the package; `--help` tells the rest.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from rich.console import Console

import fast
import reference
from fast import backends
from fast.demo.interrupts import repeated_interrupts
from fast.demo.job import ASSETS, DTYPES, check_outputs, one_line, prepare
from fast.demo.measure import measure
from fast.demo.parallel import serve_in_parallel
from fast.demo.report import draw, show, write_json
from reference.interfaces import MERGES

DURATION = "Without options it takes about 20 s on two CPU cores."


def make_parser() -> argparse.ArgumentParser:
    """The options; every one is explained."""
    parser = argparse.ArgumentParser(
        prog="python -m fast",
        description="Serves prompts together over one paged latent cache, with the reference wing and with the fast "
        "wing, and compares both with plain transformers: parity op by op, greedy tokens, cache bytes, speed. "
        + DURATION,
        epilog="Exit status: 0 where everything agrees, 1 where parity fails or (in float32) tokens differ, 2 for bad "
        "input, 130 after Ctrl-C.",
    )
    kernel_sets = ", ".join(candidate.name for candidate in backends.registered())
    options = {
        "--model": dict(
            default=str(ASSETS / "tiny-mla"),
            metavar="PATH|OWNER/NAME",
            help="folder or hub name of a checkpoint of the DeepSeek-V2 or V3 architecture (default: the small one "
            "that ships with the package; a folder is read without any network)",
        ),
        "--prompt": dict(
            action="append",
            metavar="TEXT",
            help="a prompt; may be given several times (default: eight pieces of Python source)",
        ),
        "--max-new-tokens": dict(
            type=int, default=64, metavar="N", help="most tokens to generate for each prompt (default: %(default)s)"
        ),
        "--ops": dict(
            choices=("reference", "fast", "both"),
            default="both",
            help="which wing serves; the parity table needs both (default: %(default)s)",
        ),
        "--device": dict(
            metavar="DEVICE",
            help="cpu, cuda or cuda:N (default: cuda where the chosen wings can serve there, else cpu)",
        ),
        "--dtype": dict(
            choices=tuple(DTYPES), help="of weights and cache (default: float32 on a CPU, bfloat16 on a GPU)"
        ),
        "--backend": dict(
            metavar="NAME",
            help=f"backend of the fast wing, one of: {kernel_sets}; it serves the ops that it has kernels for, and is "
            "an error where it cannot (default: chosen by capability, op by op)",
        ),
        "--block-size": dict(
            type=int, default=16, metavar="N", help="tokens in a block of the paged cache (default: %(default)s)"
        ),
        "--workspace-tokens": dict(
            type=int,
            default=256,
            metavar="N",
            help="most tokens of cached context that are expanded at once (default: %(default)s, so few that the "
            "longer prompts need several chunks)",
        ),
        "--token-budget": dict(
            type=int,
            default=256,
            metavar="N",
            help="most tokens in one step: the decodes, then pieces of prompts (default: %(default)s)",
        ),
        "--context-parallel": dict(
            type=int,
            metavar="D",
            help="ranks that share each sequence, under torchrun; all processes share the heads. Prompts are served "
            "by all and by one alone, and the tokens compared; no parity table, no picture (default: one process)",
        ),
        "--interleave": dict(type=int, metavar="I", help="tokens in a row on one of those ranks (default: 1)"),
        "--merge": dict(choices=MERGES, help="how those ranks merge their attention (default: a2a)"),
        "--json": dict(type=Path, metavar="PATH", help="also write all figures to this file"),
        "--picture": dict(
            type=Path,
            default=Path("mla-twins.png"),
            metavar="PATH",
            help="where the picture goes (default: %(default)s)",
        ),
        "--no-picture": dict(action="store_true", help="draw none; matplotlib is not needed then"),
        "--verbose": dict(
            action="store_true",
            help="print every reason why a kernel set serves an op or does not, instead of one line a kernel set",
        ),
    }
    for name, settings in options.items():
        parser.add_argument(name, **settings)
    return parser


def main(argv: Sequence[str] | None = None, *, ops: ModuleType = fast, oracle: ModuleType = reference) -> int:
    """Run the main job.

    Args:
        argv: the options; those of the process where None.
        ops: what serves as the fast wing.
        oracle: what serves as the reference wing.

    Returns:
        The exit status; 130 after Ctrl-C, which one line on stderr tells.
    """
    args = make_parser().parse_args(argv)
    try:
        with repeated_interrupts():
            return run(args, ops, oracle) if args.context_parallel is None else serve_in_parallel(args, ops, oracle)
    except KeyboardInterrupt:
        status = 130  # as a shell has it: 128 and the number of SIGINT
    if os.environ.get("RANK", "0") == "0":
        print("interrupted", file=sys.stderr, flush=True)
    if args.context_parallel is not None:
        os._exit(status)  # taking a communicator down may wait for ranks that are gone
    return status


def run(args: argparse.Namespace, ops: ModuleType, oracle: ModuleType) -> int:
    """Serve, compare, show and write, in one process.

    Args:
        args: the options.
        ops: what serves as the fast wing.
        oracle: what serves as the reference wing.

    Returns:
        The exit status.
    """
    started = time.perf_counter()
    for option in ("interleave", "merge"):
        if getattr(args, option) is not None:
            print(f"error: --{option}: expected --context-parallel beside it, got none", file=sys.stderr)
            return 2
    try:
        check_outputs(args)
        job = prepare(args, ops, oracle)
    except (OSError, ValueError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, 110))
    figures = {**measure(job, console), "seconds": time.perf_counter() - started}
    show(console, figures, args.verbose)
    try:
        if not args.no_picture:
            draw(figures, args.picture)
            console.print(f"picture: {args.picture}", markup=False)
        if args.json is not None:
            write_json(figures, args.json)
            console.print(f"figures: {args.json}", markup=False)
    except OSError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    return 0 if figures["verdict"]["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
