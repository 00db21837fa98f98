"""The calls of FlashMLA over the kernels of this package. A program for FlashMLA's dense decode changes one import.

    from fast.integrations.flash_mla import flash_mla_with_kvcache, get_mla_metadata

Arguments, layouts and conventions are those of FlashMLA (https://github.com/deepseek-ai/FlashMLA). Both of its
interfaces work: `get_mla_metadata()` without arguments (commit 9241ae3, 2026), and with the arguments of 2025 (commits
414a2f3 and c28eca9). B is the number of requests, Sq the number of query tokens of each request, N the number of heads,
V the width of a latent, and D = V + R the width of a cache entry with its rope part.

| | FlashMLA | `fast.mla_decode` |
|---|---|---|
| queries | one tensor [B, Sq, N, D] | two tensors [T, N, V] and [T, N, R], T = B Sq |
| cache | [blocks, block size, 1, D] | [blocks, block size, D] |
| output | [B, Sq, N, V] | [T, N, V] |
| LSE | [B, N, Sq]; +inf for a query token without keys | [N, T]; -inf for a query token without keys |
| default scale of the scores | D^-1/2 | none |

FlashMLA needs D 576, V 512 and blocks of 64 tokens. This module also accepts every other width and block size of
`fast.mla_decode`. Sparse attention, attention sinks and a second cache are refused by name.
"""

from .interface import FlashMLASchedMeta, flash_mla_with_kvcache, get_mla_metadata

__all__ = ["FlashMLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]
