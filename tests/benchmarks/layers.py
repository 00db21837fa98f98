"""Make the layers and batches of the benchmarks that time whole steps or single ops of a layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import fast
from reference.interfaces import CommonAttentionMetadata, MLAConfig, RopeConfig

BLOCK_SIZE = 64
DTYPE = torch.bfloat16
SMALL = MLAConfig(64, 4, 32, 32, 16, 8, 16, 1e-6, RopeConfig())  # config that runs on a CPU within seconds


@dataclass(frozen=True)
class Batch:
    """Numbers and lengths of the requests of a batch; the decodes come before the prompts.

    Attributes:
        decodes: number of decodes, which are requests with one new token.
        keys: number of keys of each decode.
        prompts: number of prompts, which are requests with many new tokens.
        new_tokens: number of new tokens of each prompt.
        context: number of cached tokens of each prompt.
    """

    decodes: int
    keys: int
    prompts: int
    new_tokens: int
    context: int = 0

    @property
    def query_lens(self) -> list[int]:
        """New tokens of each request."""
        return [1] * self.decodes + [self.new_tokens] * self.prompts

    @property
    def seq_lens(self) -> list[int]:
        """Keys of each request, new tokens included."""
        return [self.keys] * self.decodes + [self.context + self.new_tokens] * self.prompts


def dtype_for(device: str) -> torch.dtype:
    """Return bfloat16 on a GPU, and float32 on a CPU."""
    return DTYPE if device == "cuda" else torch.float32


def config_for(device: str, heads: int | None = None) -> MLAConfig:
    """Return DeepSeek-V3's config for a GPU, or the config SMALL for a CPU; `heads` replaces the number of heads."""
    config = MLAConfig.from_preset("deepseek-v3") if device == "cuda" else SMALL
    return config if heads is None else replace(config, num_heads=heads)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch compute with one thread: with several threads that wait for each other, short times vary."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def host_threads(device: str) -> contextlib.AbstractContextManager[None]:
    """Let PyTorch use one CPU thread if `device` is "cpu"; otherwise do not change the number of threads."""
    return one_thread() if device == "cpu" else contextlib.nullcontext()


def make_layer(config: MLAConfig, dtype: torch.dtype = DTYPE, device: str = "cuda", **options) -> fast.MLAAttention:
    """Return a layer with random weights."""
    c, kind = config, {"dtype": dtype, "device": device}

    def linear(width: int, out: int) -> nn.Linear:
        return nn.Linear(width, out, bias=False, **kind)

    given = {
        "kv_a_proj_with_mqa": linear(c.hidden_size, c.head_size),
        "kv_a_layernorm": nn.RMSNorm(c.kv_lora_rank, **kind),
        "kv_b_proj": linear(c.kv_lora_rank, c.num_heads * (c.qk_nope_head_dim + c.v_head_dim)),
        "o_proj": linear(c.num_heads * c.v_head_dim, c.hidden_size),
    }
    if c.q_lora_rank is None:
        given["q_proj"] = linear(c.hidden_size, c.num_heads * c.qk_head_dim)
    else:
        given["q_a_proj"] = linear(c.hidden_size, c.q_lora_rank)
        given["q_a_layernorm"] = nn.RMSNorm(c.q_lora_rank, **kind)
        given["q_b_proj"] = linear(c.q_lora_rank, c.num_heads * c.qk_head_dim)
    return fast.MLAAttention(config, **given, **options)


def num_blocks(seq_lens: Sequence[int], block_size: int = BLOCK_SIZE) -> int:
    """Return the number of cache blocks that requests of these lengths occupy."""
    return sum(-(-length // block_size) for length in seq_lens)


def make_batch(
    query_lens: Sequence[int], seq_lens: Sequence[int], device: str, block_size: int = BLOCK_SIZE
) -> CommonAttentionMetadata:
    """Return a batch in which each request has cache blocks of its own, in random order."""
    blocks = torch.randperm(num_blocks(seq_lens, block_size)).to(torch.int32)
    table = torch.zeros(len(seq_lens), -(-max(seq_lens) // block_size), dtype=torch.int32)
    end = 0
    for request, length in enumerate(seq_lens):
        count = num_blocks([length], block_size)
        table[request, :count] = blocks[end : end + count]
        end += count
    return CommonAttentionMetadata.from_lens(query_lens, seq_lens, table.to(device), block_size)


def positions_of(query_lens: Sequence[int], seq_lens: Sequence[int], device: str) -> Tensor:
    """Return the position of each new token in its request, [T]."""
    found = [torch.arange(s - q, s) for q, s in zip(query_lens, seq_lens, strict=True)]
    return torch.cat(found).to(device)
