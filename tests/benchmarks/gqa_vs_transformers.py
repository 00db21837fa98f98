"""Time the decode of one token in a model with one attention layer of Llama 3 8B: transformers, reference, fast.

    python -m tests.benchmarks.gqa_vs_transformers
    python -m tests.benchmarks.gqa_vs_transformers --contexts 4096 --threads 2 --json gqa_vs_transformers.json

The model is a Llama model of one layer: a token embedding, the attention layer (32 query heads, 8 KV heads, head dim
128), and an MLP with one unit. It decodes one token at a time, with batch size 1, in float32, on the CPU. The caches of
all implementations are filled with the same random keys and values. `fast` runs twice: with cache blocks that follow
each other in memory, as `use_attention` allocates them, and with blocks in random order, as in a cache that many
requests have used. After each token the next implementation has its turn, so that a drift of the machine's speed
affects all. A time is the time of a whole step, projections included. Before the timing, the first output of each
implementation is compared with the output of transformers in float64. The error must be within a budget, which is
computed from the error of `reference` in float32.
"""

from __future__ import annotations

import argparse
import copy
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, LlamaConfig, LlamaModel

import fast
import reference
from fast.integrations.transformers import use_attention
from fast.integrations.transformers.gqa.cache import KeyValueEntry, key_value_layers
from fast.parity import compare

from .command_line import write_report
from .report import provenance

BLOCK_SIZE = 16
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SCATTERED = "fast, scattered blocks"


def one_layer_model() -> LlamaModel:
    """Return a Llama model with random weights; nearly all its time is the time of its one attention layer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8, num_hidden_layers=1, hidden_size=HEADS * HEAD_DIM, intermediate_size=1, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )  # fmt: skip
    return LlamaModel(config).eval()


def filled_stock_cache(model: LlamaModel, entries: torch.Tensor) -> DynamicCache:
    """Return the cache of transformers, filled with `entries` [2, tokens, KV heads, head dim]."""
    cache = DynamicCache(config=model.config)
    cache.update(*entries[:, None].transpose(2, 3), 0)
    return cache


def filled_paged_cache(
    model: LlamaModel, ops, entries: torch.Tensor, more_tokens: int, scattered: bool = False
) -> DynamicCache:
    """Return the paged cache of `use_attention`, filled with `entries`, with room for `more_tokens` tokens.

    With `scattered`, the blocks of the request are in random order.
    """
    cache = DynamicCache(config=model.config)
    cache.layers[:] = key_value_layers(cache, 1, BLOCK_SIZE)
    layer, tokens = cache.layers[0], entries.shape[1]
    table = layer.record.reserve(1, tokens + more_tokens)
    if scattered:
        table[0] = torch.randperm(table.shape[1], dtype=torch.int32)
    kv_cache = layer.reserve(ops, 1, table.shape[1], KeyValueEntry(KV_HEADS, HEAD_DIM, entries.dtype, entries.device))
    slots = ops.slot_mapping(
        torch.tensor([0, tokens], dtype=torch.int32),
        torch.tensor([tokens], dtype=torch.int32),
        table,
        BLOCK_SIZE,
        tokens,
    )
    ops.reshape_and_cache(*entries, kv_cache, slots)
    layer.record.commit(tokens, torch.tensor([tokens], dtype=torch.int32), None)
    return cache


def stepper(model: LlamaModel, cache: DynamicCache) -> Callable[[], torch.Tensor]:
    """Return a function that decodes one token and returns the hidden state of the token, [hidden size]."""
    token = torch.tensor([[3]])

    def step() -> torch.Tensor:
        with torch.inference_mode():
            return model(token, past_key_values=cache, use_cache=True).last_hidden_state[0, 0]

    return step


def measure(context: int, steps: int, reference_steps: int) -> list[dict]:
    """Return one row of results for each of the implementations at one context length.

    Raises:
        RuntimeError: the error of an output exceeds its budget; nothing is timed.
    """
    model = one_layer_model()
    entries = torch.randn(2, context, KV_HEADS, HEAD_DIM)
    gold = stepper(copy.deepcopy(model).double(), filled_stock_cache(model, entries.double()))()
    steppers, first_outputs = {}, {}
    for name, ops in (("transformers", None), ("reference", reference), ("fast", fast), (SCATTERED, fast)):
        served = copy.deepcopy(model)
        if ops is None:
            cache = filled_stock_cache(served, entries)
        else:
            use_attention(served, ops=ops, block_size=BLOCK_SIZE)
            cache = filled_paged_cache(served, ops, entries, steps + 3, name == SCATTERED)
        steppers[name] = stepper(served, cache)
        first_outputs[name] = steppers[name]()
    low = first_outputs["reference"]  # float32, same formula as `fast`; the budget is computed from the error of `low`
    parities = {name: compare(name, value, low, gold) for name, value in first_outputs.items()}
    for parity in parities.values():
        if not parity.passed:
            raise RuntimeError(f"{parity}: the error exceeds the budget at context {context}, so nothing was timed")

    times: dict[str, list[float]] = {name: [] for name in steppers}
    for turn in range(steps + 2):
        for name, step in steppers.items():
            if name == "reference" and turn >= reference_steps:
                continue
            start = time.perf_counter()
            step()
            if turn >= 2 or name == "reference":
                times[name].append(1e3 * (time.perf_counter() - start))
    base = statistics.median(times["transformers"])
    rows = []
    for name, values in times.items():
        quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
        rows.append(
            {
                "context": context, "who": name, "ms_median": quartiles[1],
                "ms_quartiles": [quartiles[0], quartiles[2]], "ms_least": min(values),
                "steps": len(values), "times_faster_than_transformers": base / quartiles[1],
                "max_error": parities[name].max_error, "max_budget": parities[name].max_budget,
            }
        )  # fmt: skip
    return rows


def main(argv: list[str] | None = None) -> None:
    """Measure and print the table, and write JSON if `--json` is given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384], help="tokens in the cache")
    parser.add_argument("--steps", type=int, default=15, help="number of timed tokens of transformers and of fast")
    parser.add_argument(
        "--reference-steps", type=int, default=3, help="number of timed tokens of reference, which is slow"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="number of CPU threads of PyTorch")
    parser.add_argument("--json", type=pathlib.Path, help="file for hardware, versions and rows")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    rows = [
        row for context in arguments.contexts for row in measure(context, arguments.steps, arguments.reference_steps)
    ]
    table = Table(title="One decoded token, one attention layer of Llama 3 8B, float32, batch 1")
    for title in ("context", "", "median ms", "quartiles", "x transformers", "max error / budget"):
        table.add_column(title, justify="left" if not title else "right")
    for row in rows:
        low, high = row["ms_quartiles"]
        table.add_row(
            str(row["context"]), row["who"], f"{row['ms_median']:.2f}", f"{low:.2f} - {high:.2f}",
            f"{row['times_faster_than_transformers']:.1f}", f"{row['max_error']:.1e} / {row['max_budget']:.1e}",
            end_section=row["who"] == SCATTERED,
        )  # fmt: skip
    Console(width=max(100, Console().width)).print(table)
    if arguments.json:
        given = sys.argv[1:] if argv is None else argv
        head = provenance("gqa_vs_transformers", given, transformers=transformers.__version__)
        write_report(arguments.json, {**head, "rows": rows})


if __name__ == "__main__":
    main()
