"""Figures of the main job that depend on the attention family, for Multi-head Latent Attention."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
from rich.console import Console

from reference.interfaces import QueryLenSupport, element_bytes

from .. import backends
from ..compilation import warmup
from ..parity import Parity
from .job import Job
from .kernel_summary import REFERENCE_ALONE, summarize_kernels
from .op_parity import run_parity

LONGEST_DECODE = 3  # largest number of query tokens of a decode in the comparison of ops


def compile_ahead(job: Job, console: Console) -> None:
    """Compile the kernels of `fast` for the model, so that no measured time includes a compilation."""
    console.print("compiling kernels ...")
    started = time.perf_counter()
    compiled = warmup(
        job.config, device=job.device, dtype=job.dtype, block_size=job.args.block_size,
        decode_threshold=LONGEST_DECODE, context_parallel=job.context_parallel, cache_format=job.cache_format,
        fp8_mode=job.fp8_mode, backend=job.args.backend, progress=False,
    )  # fmt: skip
    console.print(f"compiled {len(compiled)} kernels in {time.perf_counter() - started:.0f} s")


def compare_ops(job: Job, num_tokens: int) -> list[Parity]:
    """Compare `fast` with `reference` op by op, with the weights of the first layer.

    Args:
        job: the job.
        num_tokens: tokens of the batch with which ops are compared.
    """
    return run_parity(
        job.model.base_model.layers[0].self_attn, layer_input(job, num_tokens), job.packages["fast"],
        job.packages["reference"], job.args.block_size, job.args.workspace_tokens, job.args.backend,
        job.cache_format, None if job.kv_scales is None else next(iter(job.kv_scales.values())),
        job.fp8_mode, None if job.q_scales is None else next(iter(job.q_scales.values())),
    )  # fmt: skip


@torch.inference_mode()
def layer_input(job: Job, num_tokens: int) -> torch.Tensor:
    """Return the input [num_tokens, H] of the first attention layer for the tokens of the prompts.

    The prompts are repeated if they are too short.
    """
    base = job.model.base_model
    stream = list(itertools.islice(itertools.cycle(itertools.chain(*job.prompt_ids)), num_tokens))
    return base.layers[0].input_layernorm(base.embed_tokens(torch.tensor(stream, device=job.device)))


def cache_figures(job: Job) -> dict[str, Any]:
    """Return the bytes that a cache of all layers needs for 1000 tokens.

    `latent_bytes_per_1000_tokens` is for a cache of latents. `expanded_bytes_per_1000_tokens` is for a cache of keys
    and values of every head.
    """
    c, entries = job.config, job.model.config.num_hidden_layers * 1000
    latent = entries * job.cache_format.entry_bytes(c.kv_lora_rank, c.qk_rope_head_dim, job.dtype)
    expanded = entries * c.num_heads * (c.qk_head_dim + c.v_head_dim) * element_bytes(job.dtype)
    return {
        "latent_bytes_per_1000_tokens": latent,
        "expanded_bytes_per_1000_tokens": expanded,
        "ratio": expanded / latent,
    }


def kernels(job: Job) -> dict[str, list[str]]:
    """Return which backend serves each op of the package `fast` (`summarize_kernels`)."""
    if "fast" not in job.packages:
        return {"lines": REFERENCE_ALONE, "summary": REFERENCE_ALONE}
    c, block = job.config, job.args.block_size
    lines = backends.explain(
        c, device=job.device, dtype=job.dtype, block_size=block, cache_format=job.cache_format,
        fp8_mode=job.fp8_mode, backend=job.args.backend,
    )  # fmt: skip
    decode = backends.decode_request(
        job.device, job.dtype, c.kv_lora_rank, c.qk_rope_head_dim, block, QueryLenSupport.VARLEN,
        cache_format=job.cache_format, fp8_mode=job.fp8_mode,
    )  # fmt: skip
    return summarize_kernels(lines.splitlines(), decode)
