"""The command `python -m fast backends`: which backends can serve a model on this machine, and which are chosen."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from reference.interfaces import CACHE_FORMATS, COMPUTE_FORMAT, PRESETS, MLAConfig, UnsupportedConfiguration

from .. import backends
from ..backends.explanation import choice_of
from ..backends.selection import reasons_against
from .job import DTYPES, one_line

NO_CONTEXT = "flash_attn_varlen, without context"  # attention of prompts without context, which needs no LSE


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options; each option has a help text."""
    parser = argparse.ArgumentParser(
        prog="python -m fast backends",
        description="Print which backends can serve the ops of a model on this machine, why others cannot, and which "
        "backend is chosen for each op. The command launches no kernel.",
        epilog="Exit status: 0, or 2 for bad input. The environment variables MLA_PREFILL_BACKEND and "
        "MLA_DECODE_BACKEND are read as by a layer.",
    )
    parser.add_argument("--preset", choices=tuple(PRESETS), default="deepseek-v3", help="model (default: %(default)s)")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda if torch sees a GPU, otherwise cpu)")
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), help="dtype of the layer (default: float32 on a CPU, bfloat16 on a GPU)"
    )
    parser.add_argument(
        "--block-size", type=int, default=64, metavar="N", help="tokens of a cache block (default: %(default)s)"
    )
    parser.add_argument(
        "--cache-format",
        choices=tuple(CACHE_FORMATS),
        default=COMPUTE_FORMAT.name,
        help="format of the cache (default: %(default)s)",
    )
    parser.add_argument("--backend", metavar="NAME", help="backend that the user passes to a layer as `backend=`")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status.

    Args:
        argv: options, without the word "backends".
    """
    args = make_parser().parse_args(argv)
    try:
        found = examine(args)
    except (ValueError, UnsupportedConfiguration) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        show(found)
    return 0


def examine(args: argparse.Namespace) -> dict[str, Any]:
    """Return which backends can serve the ops of a model, and which are chosen.

    Returns:
        A dict with these keys. The attention of prefills has two entries in each mapping from ops: with the LSE, for
        prompts with context, and NO_CONTEXT.

        - `preset`, `device`, `dtype`, `cache_format` and `block_size`;
        - `environment`: a mapping from op to the variable that binds the op;
        - `backends`: a list with name, library, what is missing on the machine, and for each op of the backend the
          reasons against it;
        - `chosen`: a mapping from op to the name of a backend, or None;
        - `chosen_by`: a mapping from op to how the backend was chosen, as in `explain`: `how` and `in_words`; `gpu`, on
          which the times were measured, or None; and `shapes`, a mapping from each other backend that measured times
          choose to the shapes for which they choose it.

    Raises:
        ValueError: the device, the block size, the backend or a variable of the environment is invalid.
        UnsupportedConfiguration: the named backend declares no op.
    """
    try:
        device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"--device: expected cpu, cuda or cuda:N, got {args.device!r}") from None
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and (device.index or 0) >= present):
        raise ValueError(f"--device: expected cpu or one of the {present} CUDA devices that torch sees, got {device}")
    if args.block_size < 1:
        raise ValueError(f"--block-size: expected at least 1, got {args.block_size}")
    dtype = args.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    config, cache_format = MLAConfig(**PRESETS[args.preset]), CACHE_FORMATS[args.cache_format]
    bound = backends.bind_with_environment(args.backend)
    requests = {
        request.op: request
        for request in backends.layer_requests(config, device, DTYPES[dtype], args.block_size, cache_format)
    }
    requests[NO_CONTEXT] = dataclasses.replace(requests["flash_attn_varlen"], lse=False, out_dtype=DTYPES[dtype])
    choices = {label: choice_of(request, bound) for label, request in requests.items()}
    rows = []
    for candidate in backends.registered():
        ops = {
            label: reasons_against(candidate, request, is_named=True)
            for label, request in requests.items()
            if request.op in candidate.ops
        }
        rows.append({
            "name": candidate.name,
            "library": candidate.library,
            "missing": list(candidate.missing()),
            "only_named": candidate.only_named,
            "ops": {op: [why.removeprefix(f"{candidate.name}: ") for why in reasons] for op, reasons in ops.items()},
        })  # fmt: skip
    return {
        "preset": args.preset, "device": str(device), "dtype": dtype, "cache_format": cache_format.name,
        "block_size": args.block_size, "environment": {} if bound is None else dict(bound.variables),
        "backends": rows, "chosen": {label: choice.name for label, choice in choices.items()},
        "chosen_by": {label: {"how": choice.how, "gpu": choice.gpu, "shapes": dict(choice.shapes),
                              "in_words": choice.in_words} for label, choice in choices.items()},
    }  # fmt: skip


def show(found: dict[str, Any]) -> None:
    """Print the result of `examine` as two tables."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, 110))
    console.print(
        f"{found['preset']} on {found['device']}, {found['dtype']}, cache format {found['cache_format']}, blocks of "
        f"{found['block_size']} tokens",
        markup=False,
    )
    table = Table(title="backends")
    for column in ("name", "kernels of", "can serve", "reasons against the others"):
        table.add_column(column)
    for row in found["backends"]:
        serves = [op for op, reasons in row["ops"].items() if not reasons]
        reasons = row["missing"] or list(dict.fromkeys(why for each in row["ops"].values() for why in each))
        counted = f"{len(serves)} of {len(row['ops'])} ops" + (", if named" if row["only_named"] and serves else "")
        table.add_row(row["name"], row["library"] or "mla-twins", counted, "; ".join(reasons))
    console.print(table)
    table = Table(title="chosen for each op")
    table.add_column("op")
    table.add_column("backend")
    table.add_column("how")
    for op, name in found["chosen"].items():
        table.add_row(op, name or "none can serve it", found["chosen_by"][op]["in_words"])
    console.print(table)
