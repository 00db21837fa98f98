"""A test of the compiled merge kernel, without a GPU: no warp overwrites an LSE that another warp has not loaded yet.

`forward_prefill` merges each chunk into the memory of the running state. In a program of `_merge_kernel`, every warp
loads the LSEs of its rows. One warp stores the merged LSEs, into the same memory.
"""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")
from fast.kernels.triton import merge

from ...support.compiled import Recorded, compiled


@pytest.mark.parametrize("heads", [1, 3, 16, 128])
@pytest.mark.parametrize("value", [12, 64, 128, 512])
def test_barrier_before_the_first_store(value, heads, monkeypatch):
    """Compile an in-place merge for compute capability 9.0 -> a barrier of all warps between its loads and stores."""
    launches = {}
    monkeypatch.setattr(merge, "_merge_kernel", Recorded(merge._merge_kernel, launches))
    monkeypatch.setattr(
        merge, "launch", lambda kernel, grid, *arguments, **constants: kernel[grid](*arguments, **constants)
    )
    states = [(torch.zeros(5, heads, value), torch.zeros(heads, 5)) for _ in range(2)]
    merge.merge_attn_states(*states[0], *states[1], *states[1])
    (variant,) = launches.values()
    lines = [line.strip() for line in compiled(*variant).asm["ptx"].splitlines()]
    places = {
        name: [number for number, line in enumerate(lines) if re.search(pattern, line)]
        for name, pattern in (("load", r"ld\.global"), ("store", r"st\.global"), ("barrier", r"bar(rier)?\.sync"))
    }
    assert places["load"] and places["store"]
    last_load, first_store = max(places["load"]), min(places["store"])
    assert last_load < first_store
    assert any(last_load < barrier < first_store for barrier in places["barrier"])
