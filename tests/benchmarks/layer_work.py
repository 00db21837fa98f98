"""Count the least work of each stage of an attention layer, and compute the floor of a stage from it."""

from __future__ import annotations

from typing import NamedTuple

from reference.interfaces import MLAConfig

from .layers import Batch
from .timing import Ceilings

MOVING = ("write", "merge")  # stages that only move bytes


class Work(NamedTuple):
    """Least work of a stage: floating-point operations and bytes."""

    flops: int
    bytes: int


def work_of(config: MLAConfig, batch: Batch, itemsize: int = 2) -> dict[str, Work]:
    """Return the least work of each stage of a layer: each input and weight is read once, each output written once.

    The merge of a prefill reads two attention states and writes one, all in the dtype of the layer.

    Args:
        config: dims of the layer.
        batch: decodes only, or prompts only.
        itemsize: bytes of a number.
    """
    c, tokens = config, sum(batch.query_lens)
    latent, rope, nope, value, heads = c.kv_lora_rank, c.qk_rope_head_dim, c.qk_nope_head_dim, c.v_head_dim, c.num_heads
    entry, queries = latent + rope, heads * (nope + rope)
    to_queries = c.hidden_size * queries
    if c.q_lora_rank is not None:
        to_queries = c.q_lora_rank * (c.hidden_size + queries)
    down = to_queries + c.hidden_size * entry
    absorbed, out = heads * nope * latent, heads * value * c.hidden_size

    def of(flops: int, numbers: int) -> Work:
        return Work(flops, itemsize * numbers)

    found = {
        "projections": of(2 * tokens * down, down + tokens * (c.hidden_size + queries + entry)),
        "write": of(0, tokens * (2 * heads * rope + 2 * entry)),
        "output": of(2 * tokens * out, out + tokens * (heads * value + c.hidden_size)),
    }
    if batch.prompts == 0:
        keys = sum(batch.seq_lens)
        return found | {
            "query_to_latent": of(2 * tokens * absorbed, absorbed + tokens * heads * (nope + latent)),
            "attention": of(2 * heads * keys * (entry + latent), keys * entry + tokens * heads * (entry + latent)),
            "latent_to_value": of(
                2 * tokens * heads * latent * value, heads * latent * value + tokens * heads * (latent + value)
            ),
        }
    cached, per_key = batch.prompts * batch.context, heads * (nope + value)
    pairs = batch.prompts * (batch.new_tokens * batch.context + batch.new_tokens**2 // 2)
    keys = cached + tokens
    found |= {
        "expansion": of(2 * keys * latent * per_key, latent * per_key + cached * entry + tokens * latent
                        + keys * per_key),
        "attention": of(2 * heads * pairs * (nope + rope + value),
                        tokens * (queries + heads * value) + keys * (per_key + rope)),
    }  # fmt: skip
    if cached:
        found["merge"] = of(0, 3 * tokens * heads * value)
    return found


def floor_us(stage: str, work: Work, ceilings: Ceilings) -> float:
    """Return the floor of a stage in microseconds."""
    bandwidth = ceilings.copy_gb_s if stage in MOVING else ceilings.read_gb_s
    return max(work.flops / ceilings.matmul_tflops / 1e6, work.bytes / bandwidth / 1e3)
