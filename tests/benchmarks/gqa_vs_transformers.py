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

import copy
import pathlib
import sys
from collections.abc import Sequence

import torch
from transformers import DynamicCache, LlamaConfig, LlamaModel

import fast
import reference
from fast.integrations.transformers import use_attention
from fast.integrations.transformers.gqa.cache import KeyValueEntry, key_value_layers

from . import versus_transformers
from .versus_transformers import stepper, timed_rows

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


def measure(context: int, steps: int, reference_steps: int) -> list[dict]:
    """Return one row of results for each of the implementations at one context length.

    Raises:
        RuntimeError: the error of an output exceeds its budget; nothing is timed.
    """
    model = one_layer_model()
    entries = torch.randn(2, context, KV_HEADS, HEAD_DIM)
    gold = stepper(copy.deepcopy(model).double(), filled_stock_cache(model, entries.double()))()
    steppers = {}
    for name, ops in (("transformers", None), ("reference", reference), ("fast", fast), (SCATTERED, fast)):
        served = copy.deepcopy(model)
        if ops is None:
            cache = filled_stock_cache(served, entries)
        else:
            use_attention(served, ops=ops, block_size=BLOCK_SIZE)
            cache = filled_paged_cache(served, ops, entries, steps + 3, name == SCATTERED)
        steppers[name] = stepper(served, cache)
    return timed_rows(context, steppers, gold, steps, reference_steps)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table, and write JSON if `--json` is given; return the exit status."""
    title = "One decoded token, one attention layer of Llama 3 8B, float32, batch 1"
    return versus_transformers.main(pathlib.Path(__file__).stem, __doc__.splitlines()[0], title, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
