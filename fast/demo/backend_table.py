"""The command `python -m fast backends`: which backends can serve a model on this machine, and which are chosen."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from reference.interfaces import (
    CACHE_FORMATS,
    COMPUTE_FORMAT,
    PRESETS,
    CacheFormat,
    MLAConfig,
    UnsupportedConfiguration,
    check,
)
from reference.interfaces.gqa import GQAConfig, check_key_value_block_size, check_key_value_format

from .. import backends
from ..backends.explanation import choice_of
from ..backends.registry import failed_entry_points
from ..backends.selection import labelled_by_part, reasons_against
from .job import DTYPES, one_line

NO_CONTEXT = "flash_attn_varlen, without context"  # attention of prompts without context, which needs no LSE
GQA_PRESETS = {
    # {name of the model: config of a layer}, from the published configs; for models whose layers alternate, the layers
    # with a window or with attention chunks
    "llama-3-8b": GQAConfig(num_heads=32, num_kv_heads=8, head_dim=128),  # Qwen3-8B has the same dims
    "gemma-2-9b": GQAConfig(num_heads=16, num_kv_heads=8, head_dim=256, sliding_window=4096, logits_soft_cap=50.0),
    "gpt-oss-120b": GQAConfig(num_heads=64, num_kv_heads=8, head_dim=64, sliding_window=128, attention_sinks=True),
    "llama-4-scout": GQAConfig(num_heads=40, num_kv_heads=8, head_dim=128, attention_chunk_size=8192),
}
FAMILY_PRESETS = {"mla": {name: MLAConfig(**dims) for name, dims in PRESETS.items()}, "gqa": GQA_PRESETS}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options; each option has a help text."""
    parser = argparse.ArgumentParser(
        prog="python -m fast backends",
        description="Print which backends can serve the ops of a model on this machine, why others cannot, and which "
        "backend is chosen for each op. The command launches no kernel.",
        epilog="Exit status: 0, 2 for bad input, or 1 if the reader of the output ends early. The environment "
        "variables MLA_PREFILL_BACKEND, MLA_DECODE_BACKEND, GQA_PREFILL_BACKEND and GQA_DECODE_BACKEND are read as "
        "by a layer of the family.",
    )
    parser.add_argument(
        "--family",
        choices=tuple(FAMILY_PRESETS),
        default="mla",
        help="attention family: mla is Multi-head Latent Attention, gqa is grouped-query attention (default: "
        "%(default)s)",
    )
    names = "; ".join(f"for {family} one of: {', '.join(presets)}" for family, presets in FAMILY_PRESETS.items())
    defaults = " or ".join(default_preset(family) for family in FAMILY_PRESETS)
    parser.add_argument("--preset", metavar="MODEL", help=f"model, {names} (default: {defaults})")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda if torch sees a GPU, otherwise cpu)")
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), help="dtype of the layer (default: float32 on a CPU, bfloat16 on a GPU)"
    )
    parser.add_argument(
        "--block-size",
        type=int,
        default=64,
        metavar="N",
        help="tokens of a cache block; for gqa a multiple of 16 (default: %(default)s)",
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


def default_preset(family: str) -> str:
    """Return the name of the model without `--preset`."""
    return {"mla": "deepseek-v3", "gqa": "llama-3-8b"}[family]


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
    try:
        if args.json:
            print(json.dumps(found, indent=1))
        else:
            show(found)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has enough
        _discard_output()
        return 1
    return 0


def _discard_output() -> None:
    """Send further output to the null device: the interpreter writes buffered output once more when it exits."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def examine(args: argparse.Namespace) -> dict[str, Any]:
    """Return which backends can serve the ops of a model, and which are chosen.

    Returns:
        A dict with these keys. For the family mla, the attention of prefills has two entries in each mapping from ops:
        with the LSE, for prompts with context, and NO_CONTEXT. For the family gqa, the attention of decodes and of
        prefills has two entries in `chosen` and `chosen_by`, "gqa_decode" and "gqa_prefill", if a variable or a mapping
        names a backend for one of them alone.

        - `family`, `preset`, `device`, `dtype`, `cache_format` and `block_size`;
        - `environment`: a mapping from op to the variable that binds the op;
        - `backends`: a list with name, library, what is missing on the machine, for each op of the backend the
            reasons against it, and which ops serve only calls that name the backend: all (`only_named`), or those in
            `ops_only_named`;
        - `left_out`: a list of the entry points whose backends are left out, each with name, value and error;
        - `chosen`: a mapping from op to the name of a backend, or None;
        - `chosen_by`: a mapping from op to how the backend was chosen, as in `explain`: `how` and `in_words`; `gpu`, on
            which the times were measured, or None; and `shapes`, a mapping from each other backend that measured times
            choose to the shapes for which they choose it.

    Raises:
        ValueError: the device, the preset, the block size, the cache format, the backend or a variable of the
            environment is invalid; the named backend declares no op of the family.
        UnsupportedConfiguration: the backend that a variable names declares no op of the variable.
    """
    try:
        device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"--device: expected cpu, cuda or cuda:N, got {args.device!r}") from None
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and (device.index or 0) >= present):
        raise ValueError(f"--device: expected cpu or one of the {present} CUDA devices that torch sees, got {device}")
    preset, cache_format = args.preset or default_preset(args.family), CACHE_FORMATS[args.cache_format]
    config = config_of(args.family, preset, args.block_size, cache_format)
    dtype = args.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    requests = {
        request.op: request
        for request in backends.layer_requests(config, device, DTYPES[dtype], args.block_size, cache_format)
    }
    declared = {each.name: each.ops.keys() for each in backends.registered()}.get(args.backend)
    serves = declared is None or not declared.isdisjoint(requests)  # `bind_with_environment` refuses unknown names
    check(serves, "--backend", f"a backend that declares an op of --family {args.family}", args.backend)
    bound = backends.bind_with_environment(args.backend, tuple(requests))
    if args.family == "mla":
        requests[NO_CONTEXT] = dataclasses.replace(requests["flash_attn_varlen"], lse=False, out_dtype=DTYPES[dtype])
    choices = {
        part: choice_of(request, named_backends)
        for label, request in requests.items()
        for part, named_backends in labelled_by_part(request.op, label, bound).items()
    }
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
            "ops_only_named": [label for label in ops if candidate.is_only_named(requests[label].op)],
            "ops": {op: [why.removeprefix(f"{candidate.name}: ") for why in reasons] for op, reasons in ops.items()},
        })  # fmt: skip
    return {
        "family": args.family, "preset": preset, "device": str(device), "dtype": dtype,
        "cache_format": cache_format.name, "block_size": args.block_size,
        "environment": {} if bound is None else dict(bound.variables),
        "backends": rows, "left_out": [each._asdict() for each in failed_entry_points()],
        "chosen": {label: choice.name for label, choice in choices.items()},
        "chosen_by": {label: {"how": choice.how, "gpu": choice.gpu, "shapes": dict(choice.shapes),
                              "in_words": choice.in_words} for label, choice in choices.items()},
    }  # fmt: skip


def _counted(row: dict[str, Any]) -> str:
    """Return how many ops of a row of `examine` the backend can serve; an op with two entries counts once."""
    every, serves, named = (
        {"flash_attn_varlen" if op == NO_CONTEXT else op for op in ops}
        for ops in (row["ops"], [op for op, reasons in row["ops"].items() if not reasons], row["ops_only_named"])
    )
    counted = f"{len(serves)} of {len(every)} ops"
    if serves and serves <= named:
        return f"{counted}, if named"
    return f"{counted}, {len(serves & named)} of them if named" if serves & named else counted


def config_of(family: str, preset: str, block_size: int, cache_format: CacheFormat) -> MLAConfig | GQAConfig:
    """Return the config of a preset, after a check of the options that depend on the attention family."""
    presets = FAMILY_PRESETS[family]
    check(preset in presets, "--preset", f"one of {', '.join(presets)} for --family {family}", preset)
    if family == "mla":
        check(block_size >= 1, "--block-size", "at least 1", block_size)
        return presets[preset]
    check_key_value_block_size("--block-size", block_size)
    try:
        check_key_value_format(cache_format)
    except UnsupportedConfiguration as error:
        raise ValueError(f"--cache-format: {str(error).removeprefix('cache_format: ')}") from None
    return presets[preset]


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
    for row in (row for row in found["backends"] if row["ops"]):
        reasons = dict.fromkeys([*row["missing"], *(why for each in row["ops"].values() for why in each)])
        table.add_row(row["name"], row["library"] or "mla-twins", _counted(row), "; ".join(reasons))
    for failed in found["left_out"]:
        table.add_row(escape(failed["name"]), escape(failed["value"]), "left out", escape(failed["error"]))
    console.print(table)
    if others := [row["name"] for row in found["backends"] if not row["ops"]]:
        console.print(f"backends without an op of the family {found['family']}: {', '.join(others)}", markup=False)
    table = Table(title="chosen for each op")
    table.add_column("op")
    table.add_column("backend")
    table.add_column("how")
    for op, name in found["chosen"].items():
        table.add_row(op, name or "none can serve it", found["chosen_by"][op]["in_words"])
    console.print(table)
