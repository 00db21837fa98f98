"""Bits per byte of the prompts: how well the model predicts the text with a cache format; fewer bits are better."""

from __future__ import annotations

import math
from typing import Any

import torch

from reference.interfaces import COMPUTE_FORMAT, CONVERTED, CacheFormat

from .job import Job

STEP_TOKENS = 64  # tokens of one forward, which reads every key from the cache (in MLA: by the absorbed path)


def compare_bits_per_byte(job: Job) -> dict[str, Any] | None:
    """Compare the bits per byte with a cache in the dtype of the model and with a cache in the job's format.

    Returns:
        Dictionary with the bits per byte for the dtype of the model (`compute_dtype`) and for the job's format and
        fp8 mode (`over_format`), the names of both (`cache_format` and `fp8_mode`), and the relative `increase` (0.01
        is 1 percent). None if the job's cache has the dtype of the model, or if the prompts have no token to predict.
    """
    if job.cache_format == COMPUTE_FORMAT:
        return None
    plain = bits_per_byte(job, COMPUTE_FORMAT)
    if plain is None:
        return None
    stored = bits_per_byte(job, job.cache_format)
    return {
        "cache_format": job.cache_format.name,
        "fp8_mode": job.fp8_mode,
        "compute_dtype": plain,
        "over_format": stored,
        "increase": stored / plain - 1,
    }


@torch.inference_mode()
def bits_per_byte(job: Job, cache_format: CacheFormat) -> float | None:
    """Return the bits that the model needs to predict one byte of the prompts, or None if no byte is to be predicted.

    The first token of a prompt is not predicted. One process computes the result alone, also with context parallelism.
    """
    from transformers.cache_utils import DynamicCache

    from ..integrations.transformers import restore

    changes = {"cache_format": cache_format, **job.options_to_read_the_cache(STEP_TOKENS)}
    if job.context_parallel is not None:
        changes["context_parallel"] = None
    if cache_format != job.cache_format:
        changes["kv_scales"] = None
        if job.fp8_mode != CONVERTED:
            changes |= {"fp8_mode": CONVERTED, "q_scales": None}
    nats, num_bytes = 0.0, 0
    job.install(list(job.packages)[-1], **changes)
    try:
        for ids in job.prompt_ids:
            num_bytes += len(job.tokenizer.decode(ids[1:], skip_special_tokens=True).encode())
            tokens, cache = torch.tensor([ids], device=job.device), DynamicCache(config=job.model.config)
            for start in range(0, len(ids) - 1, STEP_TOKENS):
                step = tokens[:, start : start + STEP_TOKENS]
                targets = tokens[0, start + 1 : start + 1 + step.shape[1]]
                logits = job.model(step, past_key_values=cache, use_cache=True).logits[0, : len(targets)]
                nats += float(torch.nn.functional.cross_entropy(logits.double(), targets, reduction="sum"))
    finally:
        restore(job.model)
    return nats / math.log(2) / num_bytes if num_bytes else None


def format_in_words(cache_format: str, fp8_mode: str = CONVERTED) -> str:
    """Return the name of a cache format, and the fp8 mode unless it is `converted`, which is the default."""
    return cache_format if fp8_mode == CONVERTED else f"{cache_format} in the fp8 mode {fp8_mode}"


def in_words(found: dict[str, Any]) -> str:
    """Return the result of `compare_bits_per_byte` as one line."""
    stored = format_in_words(found["cache_format"], found["fp8_mode"])
    over = f"{found['over_format']:.4f} over {stored} ({found['increase']:+.2%})"
    return f"bits per byte of the prompts: {found['compute_dtype']:.4f} over compute_dtype, {over}"
