"""Helpers for tests of plans of grouped-query attention: configs, batches of cross attention, and brute force.

A plan has all integers that the attention of a step needs. The letters of shapes: B requests, T query tokens, S keys of
a request, Sq query tokens of a request, W keys of a window, D ranks that share sequences.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from reference.interfaces import TokenOwnership
from reference.interfaces.gqa import AttentionType, CrossAttentionBatch, GQAConfig

from .factories import Batch, integers, table_without_blocks
from .gqa import visible_ranges
from .ranks import owners

PLAIN = GQAConfig(4, 2, 32)
WINDOW = replace(PLAIN, sliding_window=5)
LOCAL = replace(PLAIN, attention_chunk_size=32)
CROSS = replace(PLAIN, attention_type=AttentionType.CROSS)
ENCODER = replace(PLAIN, attention_type=AttentionType.ENCODER)
ENCODER_ONLY = replace(PLAIN, attention_type=AttentionType.ENCODER_ONLY)
TILE = 64  # keys of a tile of a schedule


def held(length: int, ownership: TokenOwnership | None) -> int:
    """Return how many of the first `length` tokens of a sequence a rank owns, by counting the owner of every token."""
    if ownership is None:
        return length
    return owners(length, ownership.size, ownership.interleave).count(ownership.rank)


def wanted_ranges(config: GQAConfig, query_lens, seq_lens, ownership=None) -> list[tuple[int, int]]:
    """Return the keys [first, end) of each query token, request after request, as numbers of keys of this rank."""
    found = []
    for query_len, length in zip(query_lens, seq_lens, strict=True):
        for first, end in visible_ranges(config, query_len, length):
            found.append((held(first, ownership), held(end, ownership)))
    return found


def wanted_scheduled(config: GQAConfig, query_lens, seq_lens, ownership=None) -> list[int]:
    """Return for each request the keys that count for its schedule, found by looking at every tile.

    A tile before the first key that any query token attends does not count.
    """
    counted = []
    for query_len, length in zip(query_lens, seq_lens, strict=True):
        first, window, chunk = 0, config.sliding_window, config.attention_chunk_size
        position = length - query_len  # of the first query token
        while window is not None and first < length and first + window < position + 1:
            first += 1  # the window of the first query token begins later
        while chunk is not None and first < position and first // chunk < position // chunk:
            first += 1  # the attention chunk of the first query token begins later
        first, keys = held(first, ownership), held(length, ownership)
        while first >= TILE:
            first, keys = first - TILE, keys - TILE
        counted.append(keys)
    return counted


def cross_batch(batch: Batch, encoder_lens, block_size: int = 16, ran=None) -> CrossAttentionBatch:
    """Return a batch with encoders: a table of random blocks, and the slots of the encoders that ran in this step.

    Args:
        batch: the requests.
        encoder_lens: tokens of the encoder's output of each request.
        block_size: tokens per block.
        ran: indices of the requests whose encoder runs in this step; None means none.
    """
    used = [-(-length // block_size) for length in encoder_lens]
    blocks = torch.randperm(sum(used) + 2).tolist()
    table = table_without_blocks(len(used), max(used, default=0) + 1)
    slots = []
    for request, count in enumerate(used):
        own = [blocks.pop() for _ in range(count)]
        table[request, :count] = integers(*own)
        if ran is not None and request in ran:
            slots += [own[token // block_size] * block_size + token % block_size
                      for token in range(encoder_lens[request])]  # fmt: skip
    lens = integers(*encoder_lens)
    return CrossAttentionBatch(
        **vars(batch.common), encoder_seq_lens=lens, encoder_seq_lens_cpu=lens.cpu(), encoder_block_table=table,
        encoder_slot_mapping=torch.tensor(slots, dtype=torch.int64),
    )  # fmt: skip
