"""Main job: serve prompts with `reference` and with `fast`, and compare both packages with transformers.

Without options, the job serves eight prompts with the small checkpoint in fast/assets; `--help` explains the options.
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
from fast.demo import backend_table
from fast.demo.families import DEFAULTS, FAMILIES, Family, read_family
from fast.demo.interrupts import repeated_interrupts
from fast.demo.job import DTYPES, check_outputs, one_line, prepare
from fast.demo.measure import measure
from fast.demo.parallel import serve_in_parallel
from fast.demo.report import draw, show, write_json
from reference.interfaces import CACHE_FORMATS, COMPUTE_FORMAT, CONVERTED, FP8_MODES, MERGES

DURATION = "Without options, the job takes about 20 s on two CPU cores."


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options; each option has a help text."""
    parser = argparse.ArgumentParser(
        prog="python -m fast",
        description="Serve prompts together over one paged cache, with `reference` and with `fast`, and compare "
        "both with plain transformers: parity of each op (its error is within a computed budget), greedy tokens, bytes "
        "of the cache, speed. " + DURATION,
        epilog="Exit status: 0 if everything agrees, 1 if parity fails or (in float32) tokens differ, 2 for bad "
        "input, 130 after Ctrl-C. Another command, `python -m fast backends`, prints which kernels can serve on this "
        "machine.",
    )
    backend_names = ", ".join(candidate.name for candidate in backends.registered())
    options = {
        "--family": dict(
            choices=tuple(FAMILIES),
            default="mla",
            help="attention family: mla is Multi-head Latent Attention, gqa is grouped-query attention, which ordinary "
            "models such as Llama or Qwen have (default: %(default)s). The small checkpoint for gqa has random weights:"
            " its texts have no meaning",
        ),
        "--model": dict(
            metavar="PATH|OWNER/NAME",
            help="folder or hub name of a checkpoint: for mla with the DeepSeek-V2 or V3 architecture, for gqa a "
            "decoder that `use_attention` serves; a folder is read without network access (default: the small "
            "checkpoint of the package for the family)",
        ),
        "--prompt": dict(
            action="append",
            metavar="TEXT",
            help="one prompt; repeat the option for several prompts (default: eight excerpts of Python source)",
        ),
        "--max-new-tokens": dict(
            type=int,
            default=64,
            metavar="N",
            help="largest number of tokens that are generated for each prompt (default: %(default)s)",
        ),
        "--ops": dict(
            choices=("reference", "fast", "both"),
            default="both",
            help="which package serves the prompts; the parity table needs both (default: %(default)s)",
        ),
        "--device": dict(
            metavar="DEVICE",
            help="cpu, cuda or cuda:N (default: cuda if the chosen packages can serve on it, otherwise cpu)",
        ),
        "--dtype": dict(
            choices=tuple(DTYPES), help="dtype of weights and cache (default: float32 on a CPU, bfloat16 on a GPU)"
        ),
        "--cache-format": dict(
            choices=tuple(CACHE_FORMATS),
            default=COMPUTE_FORMAT.name,
            help="format of the cache (default: %(default)s). With another format, `fast` and `reference` must "
            "generate the same tokens, and the job reports the bits per byte of the prompts for this format and for "
            "the default format",
        ),
        "--fp8-mode": dict(
            choices=FP8_MODES,
            default=CONVERTED,
            help="dtype of the queries and products of decodes over a cache in e4m3 (default: %(default)s). With "
            "fp8_query, the queries are in e4m3; with fp8_product, the probabilities too. Both packages serve in this "
            "mode",
        ),
        "--backend": dict(
            metavar="NAME",
            help=f"backend of `fast`, one of: {backend_names}; the backend must serve every op that it has kernels for."
            " A call that the backend cannot serve is an error (default: an automatic choice for each op)",
        ),
        "--block-size": dict(
            type=int,
            default=16,
            metavar="N",
            help="tokens in a block of the paged cache; for gqa a multiple of 16 (default: %(default)s)",
        ),
        "--workspace-tokens": dict(
            type=int,
            default=DEFAULTS["workspace_tokens"],
            metavar="N",
            help="largest number of tokens of cached context that are expanded at once, for mla alone (default: "
            "%(default)s; so small that the longer default prompts need several chunks)",
        ),
        "--token-budget": dict(
            type=int,
            default=256,
            metavar="N",
            help="largest number of tokens in one step; the scheduler first takes one token of each decode, then parts "
            "of prompts (default: %(default)s)",
        ),
        "--context-parallel": dict(
            type=int,
            metavar="D",
            help="number of ranks that divide the tokens of each sequence, for mla alone; start the job with torchrun. "
            "All ranks that torchrun starts divide the heads. The job serves the prompts on all ranks, then on one "
            "rank, and compares the generated tokens. It prints no parity table and draws no picture (default: one "
            "process)",
        ),
        "--interleave": dict(
            type=int,
            metavar="I",
            help="number of consecutive tokens that a rank stores before the next rank's turn, with --context-parallel "
            "(default: 1)",
        ),
        "--merge": dict(
            choices=MERGES, help="how ranks merge their attention states, with --context-parallel (default: a2a)"
        ),
        "--json": dict(type=Path, metavar="PATH", help="JSON file to which all figures are written"),
        "--picture": dict(
            type=Path,
            default=Path("mla-twins.png"),
            metavar="PATH",
            help="file of the picture: SVG if its name ends in .svg, otherwise PNG (default: %(default)s)",
        ),
        "--no-picture": dict(action="store_true", help="draw no picture; matplotlib is then not needed"),
        "--verbose": dict(
            action="store_true",
            help="print for each op why a backend serves or refuses it, instead of one line per backend",
        ),
    }
    for name, settings in options.items():
        parser.add_argument(name, **settings)
    return parser


def main(argv: Sequence[str] | None = None, *, ops: ModuleType = fast, oracle: ModuleType = reference) -> int:
    """Run the main job.

    Args:
        argv: command-line options; None means the options with which the process was started.
        ops: module to use in place of `fast`; a test may pass another module.
        oracle: module to use in place of `reference`.

    Returns:
        The exit status. After Ctrl-C the status is 130, and stderr gets the line "interrupted". If the first option is
        "backends", the status of `fast.demo.backend_table`.
    """
    argv = sys.argv[1:] if argv is None else argv
    if list(argv[:1]) == ["backends"]:
        return backend_table.main(argv[1:])
    args = make_parser().parse_args(argv, argparse.Namespace(**dict.fromkeys(DEFAULTS)))
    try:
        family = read_family(args)
    except ValueError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    try:
        with repeated_interrupts():
            if args.context_parallel is not None:
                return serve_in_parallel(args, ops, oracle)
            return run(args, family, ops, oracle)
    except KeyboardInterrupt:
        status = 130  # the convention of shells: 128 + the signal number of SIGINT, 2
    if os.environ.get("RANK", "0") == "0":
        print("interrupted", file=sys.stderr, flush=True)
    if args.context_parallel is not None:
        os._exit(status)  # a normal exit destroys communicators, which may wait for ranks that have already ended
    return status


def run(args: argparse.Namespace, family: Family, ops: ModuleType, oracle: ModuleType) -> int:
    """Serve the prompts, compare the outputs, show the figures and write the files, in one process.

    Args:
        args: parsed options.
        family: the attention family.
        ops: module to use in place of `fast`.
        oracle: module to use in place of `reference`.

    Returns:
        The exit status.
    """
    started = time.perf_counter()
    for option in ("interleave", "merge"):
        if getattr(args, option) is not None:
            print(
                f"error: --{option}: expected together with --context-parallel, got the option without it",
                file=sys.stderr,
            )
            return 2
    try:
        check_outputs(args)
        others = {name: each.job_type for name, each in FAMILIES.items() if each is not family}
        job = prepare(args, ops, oracle, job_type=family.job_type, other_types=others)
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
