"""Test that warm-up launches the decode over `fp8_e4m3` with every size of tiles, so that no later step compiles."""

from __future__ import annotations

from dataclasses import replace

import torch

import fast
from reference.interfaces import FP8_E4M3

from ... import test_compilation
from ...support.format_caches import SMALL
from ...test_compilation import launches, serve  # noqa: F401 (`launches` is a fixture)


def test_warmup_specialises_for_both_sizes_of_tiles(launches, monkeypatch):  # noqa: F811
    """Serve few and many requests, which have tiles of 32 and of 64 keys -> warm-up launched all of their variants."""
    config, given = replace(SMALL, kv_lora_rank=64), dict(cache_format=FP8_E4M3)
    fast.warmup(config, device="cpu", dtype=torch.bfloat16, block_size=16, decode_threshold=1, **given)
    ahead = set(launches)
    decodes = [constants for kernel, _, constants in launches.values() if kernel.fn.__name__ == "_decode_kernel"]
    found = {(each["SPLIT"], each["c"].TILE) for each in decodes if each["c"].PREFETCH}
    assert found == {(split, tile) for split in (False, True) for tile in (32, 64)}
    steps = tuple(([1] * requests, [2000] * requests) for requests in (1, 2, 3, 4, 5, 16))
    monkeypatch.setattr(test_compilation, "STEPS", steps)
    serve(config, torch.bfloat16, 1, **given)
    assert set(launches) == ahead


def test_warmup_specialises_for_row_blocks_of_32_rows(launches, monkeypatch):  # noqa: F811
    """Serve many requests of 24 rows, which `choose_path` decodes -> warm-up launched their row blocks of 32 rows."""
    config, given = replace(SMALL, kv_lora_rank=64), dict(cache_format=FP8_E4M3)
    fast.warmup(config, device="cpu", dtype=torch.bfloat16, block_size=16, decode_threshold=1, **given)
    ahead = set(launches)
    decodes = [constants for kernel, _, constants in launches.values() if kernel.fn.__name__ == "_decode_kernel"]
    assert {each["SPLIT"] for each in decodes if each["ROWS"] == 32 and each["c"].PREFETCH} == {False, True}
    steps = tuple(([2] * requests, [length] * requests) for requests in (1, 3, 16, 31) for length in (2, 2000))
    monkeypatch.setattr(test_compilation, "STEPS", steps)
    serve(config, torch.bfloat16, 1, **given)
    assert set(launches) == ahead
