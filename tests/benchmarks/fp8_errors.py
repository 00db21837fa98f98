"""Measure the errors that e4m3 (8 bits) causes: in queries, probabilities and absorbed weights.

    python -m tests.benchmarks.fp8_errors --lengths 1024 131072 --json FILE
    python -m tests.benchmarks.fp8_errors --device cuda --heads 16

Without `--device cuda` the script needs no GPU: the backend "cpu" computes the decodes. With it, the backend that
`backend=None` chooses computes them, and the exact outputs are computed on the CPU.

The queries and the cache entries are random normal numbers, and `--deviation` gives the standard deviation of the
scores. The cache has the format `fp8_e4m3`, with a scale that maps the largest entry to the largest e4m3 number. An
error is the root mean square of output - exact output, divided by the root mean square of the exact output. The exact
output is computed in float64 from the dequantised cache.
The table of decodes has two columns of errors:

- "own queries": the exact output is computed from the queries after quantisation. So the error is the error of the
  rounding inside the decode.
- "exact queries": the exact output is computed from the queries before quantisation. So the error contains all errors
  except the errors of the cache.

The backend "cpu" multiplies in float32. There the mode `converted` only has the error of bfloat16 queries, and the mode
`fp8_query` only has the error of queries in e4m3.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import torch
from torch import Tensor

import fast
import reference
from reference.interfaces import E4M3_MAX, FP8_E4M3, CommonAttentionMetadata, DecodeMetadata, QuantizedWeight, to_e4m3

from .command_line import write_report
from .report import provenance

LATENT, ROPE, BLOCK_SIZE = 512, 64, 64
OUTLIER = 1e4  # factor of the queries of one head, in the rows with unequal heads
FACTORS = (1.0, 1e3, 1e4, 1e5)  # factors of the weights of one head


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Return the root mean square of `found` - `exact`, divided by the root mean square of `exact`."""
    return float((found.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def make_cache(length: int) -> tuple[Tensor, Tensor, DecodeMetadata]:
    """Return a cache of one request with `length` tokens, its scale, and the plan of a decode with one query token."""
    entries = torch.randn(length, LATENT + ROPE)
    kv_scale = entries.abs().amax() / E4M3_MAX
    blocks = -(-length // BLOCK_SIZE)
    cache = reference.allocate_kv_cache(blocks, BLOCK_SIZE, LATENT + ROPE, FP8_E4M3.storage_dtype)
    fast.concat_and_cache_mla(entries[:, :LATENT], entries[:, LATENT:], cache, torch.arange(length), FP8_E4M3, kv_scale)
    table = torch.arange(blocks, dtype=torch.int32)[None]
    common = CommonAttentionMetadata.from_lens([1], [length], table, BLOCK_SIZE)
    return cache, kv_scale, reference.build_mla_metadata(common, BLOCK_SIZE, 4096, cache_format=FP8_E4M3).decode


def decode_errors(length: int, heads: int, deviation: float, device: str = "cpu") -> list[dict]:
    """Return the errors of every mode for one length: with equal heads, and with one head that has larger queries."""
    cache, kv_scale, plan = make_cache(length)
    rows = []
    for outlier in (1.0, OUTLIER):
        queries = torch.randn(1, heads, LATENT + ROPE)
        scale = deviation / (LATENT + ROPE) ** 0.5
        size = torch.ones(heads, 1)
        size[0] = outlier

        # `own_scale` below divides the queries of each head by its factor in `size` again, so no head has larger scores
        def decode(q: Tensor, scale: float = scale, **options) -> Tensor:
            return fast.mla_decode(
                q[..., :LATENT], q[..., LATENT:], cache, plan, scale, cache_format=FP8_E4M3, kv_scale=kv_scale,
                backend="cpu", **options,
            ).out  # fmt: skip

        def measured(q: Tensor, scale: float = scale, q_scale: Tensor | None = None, **options) -> Tensor:
            if device == "cpu":
                return decode(q, scale, out_dtype=torch.float32, q_scale=q_scale, **options)
            q, q_scale = q.to(device), None if q_scale is None else q_scale.to(device)
            there = {each.name: getattr(plan, each.name) for each in dataclasses.fields(plan)}
            there = {name: value.to(device) for name, value in there.items() if isinstance(value, Tensor)}
            return fast.mla_decode(
                q[..., :LATENT], q[..., LATENT:], cache.to(device), dataclasses.replace(plan, **there), scale,
                cache_format=FP8_E4M3, kv_scale=kv_scale.to(device), out_dtype=torch.float32, q_scale=q_scale,
                **options,
            ).out.cpu()  # fmt: skip

        exact = decode(queries.double())
        if outlier == 1.0:
            halves = queries.to(torch.bfloat16)
            found = measured(halves)
            rows.append(row(length, "converted", "none", "equal", found, decode(halves.double()), exact))
        larger = queries * size
        for kind, amax in (("tensor", larger.abs().amax()), ("head", larger.abs().amax((0, 2)))):
            q_scale = amax / E4M3_MAX
            stored = to_e4m3(larger, q_scale.view(-1, 1))
            # a scale for each head, which dequantises and also divides by `size`
            own_scale = (q_scale / size.view(-1)).contiguous()
            own = decode(stored.double() * own_scale.double().view(-1, 1))
            for mode in ("fp8_query", "fp8_product"):
                found = measured(stored, fp8_mode=mode, q_scale=own_scale)
                heads_kind = "equal" if outlier == 1.0 else f"one head x {outlier:g}"
                rows.append(row(length, mode, kind, heads_kind, found[:, 1:], own[:, 1:], exact[:, 1:]))
    return rows


def row(length: int, mode: str, scale: str, heads: str, found: Tensor, own: Tensor, exact: Tensor) -> dict:
    """Return one row of the table of decodes."""
    return {"length": length, "mode": mode, "scale": scale, "heads": heads,
            "own queries": relative_error(found, own), "exact queries": relative_error(found, exact)}  # fmt: skip


def weight_errors() -> list[dict]:
    """Return the errors of absorbed weights with larger numbers in the first head; an error is over the other heads."""
    rows = []
    for factor in FACTORS:
        weight = torch.randn(16, 128, LATENT)
        weight[0] *= factor
        errors = {}
        for name, per_head in (("tensor", False), ("head", True)):
            found: QuantizedWeight = fast.quantize_weight(weight, per_head)
            dense = found.values.double() * found.scale.double().reshape(-1, 1, 1)
            errors[name] = relative_error(dense[1:], weight[1:].double())
        rows.append({"factor": factor, **errors})
    return rows


def table(rows: list[dict]) -> str:
    """Return rows as a table in Markdown; errors have two digits."""
    cells = [list(rows[0])] + [
        [f"{value:.1e}" if isinstance(value, float) else str(value) for value in each.values()] for each in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(f"{cell:<{width}}" for cell, width in zip(each, widths, strict=True)) + " |"
             for each in cells]  # fmt: skip
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def main(arguments: list[str] | None = None) -> dict:
    """Measure and print the tables, and write JSON if `--json` is given; return the measured errors."""
    parser = argparse.ArgumentParser(description="Measure the errors of e4m3 in queries, probabilities and weights.")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 16384, 131072], help="tokens of the request")
    parser.add_argument("--heads", type=int, default=4, help="number of heads, at least 2")
    parser.add_argument("--deviation", type=float, default=1.7, help="standard deviation of the scores")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random inputs (default: 0)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of the decodes (default: cpu)")
    parser.add_argument("--json", type=Path, help="file that receives hardware, versions and results")
    given = parser.parse_args(arguments)
    torch.manual_seed(given.seed)
    options = given.heads, given.deviation, given.device
    decodes = [each for length in given.lengths for each in decode_errors(length, *options)]
    found = {"deviation": given.deviation, "heads": given.heads, "decodes": decodes, "weights": weight_errors()}
    print(f"Decodes, standard deviation of the scores {given.deviation:g}\n\n{table(decodes)}\n")
    print(f"Absorbed weights, one head multiplied by a factor\n\n{table(found['weights'])}")
    if given.json is not None:
        head = provenance("fp8_errors", sys.argv[1:] if arguments is None else arguments, given.device)
        write_report(given.json, {**head, **found})
    return found


if __name__ == "__main__":
    main()
