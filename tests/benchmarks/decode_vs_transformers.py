"""Time the decode of one token in a model with one attention layer of DeepSeek-V2-Lite: transformers, reference, fast.

    python -m tests.benchmarks.decode_vs_transformers
    python -m tests.benchmarks.decode_vs_transformers --contexts 4096 --json decode_vs_transformers.json

The model is a DeepseekV2 model of one layer: a token embedding, the attention layer, and an MLP with one unit. It
decodes one token at a time, with batch size 1, in float32, on the CPU. The caches of the three implementations are
filled with the same random latents. After each token the next implementation has its turn, so that a drift of the
machine's speed affects all three. A time is the time of a whole step. Before the timing, the first output of each
implementation is compared with the output of transformers in float64. The error must be within a budget, which is
computed from the error of `reference` in float32.
"""

from __future__ import annotations

import copy
import pathlib
import sys
from collections.abc import Sequence

import torch
from transformers import DeepseekV2Config, DeepseekV2Model, DynamicCache

import fast
import reference
from fast.integrations.transformers import use_mla
from fast.integrations.transformers.cache import latent_layers
from fast.integrations.transformers.models import CacheEntry

from . import versus_transformers
from .versus_transformers import stepper, timed_rows

BLOCK_SIZE = 64


def one_layer_model() -> DeepseekV2Model:
    """Return a DeepseekV2 model with random weights; nearly all its time is the time of its one attention layer."""
    dims = fast.PRESETS["deepseek-v2-lite"]
    torch.manual_seed(0)
    config = DeepseekV2Config(
        vocab_size=8,
        num_hidden_layers=1,
        first_k_dense_replace=1,
        intermediate_size=1,
        num_key_value_heads=dims["num_heads"],
        num_attention_heads=dims["num_heads"],
        max_position_embeddings=163840,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
        **{name: size for name, size in dims.items() if name != "num_heads"},
    )
    return DeepseekV2Model(config).eval()


def filled_stock_cache(model: DeepseekV2Model, entries: torch.Tensor) -> DynamicCache:
    """Return the cache of transformers, filled with `entries` [tokens, 576]."""
    cache = DynamicCache(config=model.config)
    latent, rope = entries[None, None].split([model.config.kv_lora_rank, model.config.qk_rope_head_dim], dim=-1)
    cache.update(latent, rope, 0)
    return cache


def filled_paged_cache(model: DeepseekV2Model, ops, entries: torch.Tensor) -> DynamicCache:
    """Return the paged cache of `use_mla`, filled with `entries` [tokens, 576]."""
    cache = DynamicCache(config=model.config)
    cache.layers[:] = latent_layers(cache, 1, BLOCK_SIZE)
    layer, tokens = cache.layers[0], entries.shape[0]
    table = layer.record.reserve(1, tokens)
    kv_cache = layer.reserve(ops, 1, table.shape[1], CacheEntry(entries.shape[1], entries.dtype, entries.device))
    kv_cache.view(-1, entries.shape[1])[:tokens] = entries
    layer.record.commit(tokens, torch.tensor([tokens], dtype=torch.int32), None)
    return cache


def measure(context: int, steps: int, reference_steps: int) -> list[dict]:
    """Return one row of results for each of the three implementations at one context length.

    Raises:
        RuntimeError: the error of an output exceeds its budget; nothing is timed.
    """
    model = one_layer_model()
    entries = torch.randn(context, model.config.kv_lora_rank + model.config.qk_rope_head_dim)
    gold = stepper(copy.deepcopy(model).double(), filled_stock_cache(model, entries.double()))()
    steppers = {}
    for name, ops in (("transformers", None), ("reference", reference), ("fast", fast)):
        served = copy.deepcopy(model)
        if ops is None:
            cache = filled_stock_cache(served, entries)
        else:
            use_mla(served, ops=ops, block_size=BLOCK_SIZE)
            cache = filled_paged_cache(served, ops, entries)
        steppers[name] = stepper(served, cache)
    return timed_rows(context, steppers, gold, steps, reference_steps)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table, and write JSON if `--json` is given; return the exit status."""
    title = "One decoded token, one DeepSeek-V2-Lite attention layer, float32, batch 1"
    return versus_transformers.main(pathlib.Path(__file__).stem, __doc__.splitlines()[0], title, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
