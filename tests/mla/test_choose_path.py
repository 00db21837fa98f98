"""Tests of the choice between the absorbed and the expanded path, compared with a count of all matrix products.

The absorbed path attends over the cached latents themselves. The expanded path first turns the latents into keys and
values of every head. FLOPs are floating-point operations. The letters, such as Lkv, are those of docs/glossary.md.
"""

from __future__ import annotations

import sys
from dataclasses import astuple

import pytest
import torch

import fast
import reference
from reference.interfaces import PRESETS, CacheFormat, MLAConfig, PathCosts, QueryLenSupport

from ..support.factories import CONFIGS, integers
from ..support.factories import preset as preset_config
from ..support.properties import given, st

V3 = MLAConfig.from_preset("deepseek-v3")
ELEMENTS = {torch.float64: 8, torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}  # bytes of an element
MEASURED = PathCosts(2.0, 3.5, 1.5, 2.1e-9, 1.7e-9, 1.6e-9, 2.4e-7)


def counted(config, query_len, context_len, costs, element=2, stored=2):
    """Compute the cost of each path from the shapes of its matrix products, token by token.

    `element` is the number of bytes of a query element, and `stored` the number of bytes of a cache element.
    """
    c, keys = config, query_len + context_len
    latent, rope, nope, value = c.kv_lora_rank, c.qk_rope_head_dim, c.qk_nope_head_dim, c.v_head_dim
    absorbed = expanded = 0  # FLOPs of attention per head
    for token in range(query_len):
        seen = context_len + token + 1
        absorbed += 2 * seen * (latent + rope) + 2 * seen * latent
        expanded += 2 * seen * (nope + rope) + 2 * seen * value
    per_token = 2 * nope * latent + 2 * latent * value
    states = query_len * c.num_heads * ((latent + rope) + latent)
    expansions = keys * c.num_heads * (nope + value)
    cache = keys * (latent + rope)
    a = costs.absorbed_request + max(
        c.num_heads * (costs.absorbed_flop * absorbed + costs.projection_flop * query_len * per_token),
        costs.byte * (stored * cache + element * 2 * states),
    )
    e = (
        costs.expanded_request
        + (costs.expanded_context if context_len else 0)
        + max(
            c.num_heads * (costs.expanded_flop * expanded + costs.projection_flop * keys * per_token),
            costs.byte * (stored * cache + element * 2 * expansions),
        )
    )
    return a, e


@given(
    st.sampled_from(sorted(PRESETS)), st.integers(0, 600), st.sampled_from([0, 1, 7, 64, 1000, 20_000]),
    st.sampled_from([PathCosts(), MEASURED, PathCosts(absorbed_request=1e9)]),
    st.sampled_from(sorted(ELEMENTS, key=str)),
)  # fmt: skip
def test_against_a_count(preset, query_len, context_len, costs, dtype):
    config, element = preset_config(preset), ELEMENTS[dtype]
    absorbed, expanded = counted(config, query_len, context_len, costs, element, element)
    choices = {ops.choose_path(query_len, context_len, config, costs, dtype=dtype) for ops in (reference, fast)}
    if element == 2:  # bfloat16 is the default
        choices |= {ops.choose_path(query_len, context_len, config, costs) for ops in (reference, fast)}
    assert len(choices) == 1
    if abs(absorbed - expanded) > 1e-9 * max(absorbed, expanded):
        assert choices == {"absorbed" if absorbed < expanded else "expanded"}


@given(
    st.lists(st.tuples(st.integers(0, 100_000), st.integers(0, 10**6)), max_size=20),
    st.sampled_from([V3, *CONFIGS.values()]), st.sampled_from([None, MEASURED]), st.sampled_from([0, 1, 4]),
    st.sampled_from(list(QueryLenSupport)), st.sampled_from(sorted(ELEMENTS, key=str)),
)  # fmt: skip
def test_packages_agree(lens, config, costs, threshold, support, dtype):
    """Both packages make the same choices, and `choose_paths` gives each request the path of `choose_path`.

    Requests with at most `threshold` query tokens always get the absorbed path.
    """
    query_lens, context_lens = (integers(*(pair[i] for pair in lens)).cpu() for i in (0, 1))
    ours, theirs = (
        ops.choose_paths(query_lens, context_lens, threshold, config, costs, support, dtype=dtype)
        for ops in (reference, fast)
    )
    assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype == torch.bool
    asked = support is QueryLenSupport.VARLEN
    for (query_len, context_len), absorbed in zip(lens, theirs.tolist(), strict=True):
        own = asked and fast.choose_path(query_len, context_len, config, costs, dtype=dtype) == "absorbed"
        assert absorbed == (query_len <= threshold or own)


def test_crossover_of_flops(ops):
    """With a long context and Lkv (P + V) / (2 Lkv - P - V) query tokens, both paths need equally many FLOPs.

    For DeepSeek-V3 (Lkv = 512, P = V = 128) the choice changes at 171 query tokens.
    """
    assert round(512 * 256 / (1024 - 256)) == 171
    for preset in ("deepseek-v3", "deepseek-v2", "kimi-k2", "glm-5", "moonlight"):
        config = MLAConfig.from_preset(preset)
        both = config.qk_nope_head_dim + config.v_head_dim
        even = config.kv_lora_rank * both / (2 * config.kv_lora_rank - both)
        paths = [ops.choose_path(q, 10**8, config) for q in (int(even), int(even) + 1)]
        assert paths == ["absorbed", "expanded"], preset


BYTES_ALONE = PathCosts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
STORED = CacheFormat("stored", torch.float8_e4m3fn, (torch.bfloat16, torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_come_from_the_format(ops, dtype, monkeypatch, plain_errors):
    """The choice counts the bytes of the cache format: 1 byte for a cache element, and 2 or 4 for a query element.

    In this test the absorbed path costs FLOPs only, the expanded path costs bytes only, and both costs are nearly
    equal. The choice is therefore wrong if it counts another number of bytes for a cache element.
    """
    monkeypatch.setattr(sys.modules["reference.interfaces.cache_format"], "CACHE_FORMATS", {"stored": STORED})
    config, element = V3, ELEMENTS[dtype]
    for query_len, context_len in ((3, 1000), (200, 5000)):
        _, expanded = counted(config, query_len, context_len, BYTES_ALONE, element, 1)
        attention = counted(config, query_len, context_len, PathCosts(byte=0.0, projection_flop=0.0))[0]
        for factor, wanted in ((0.999, "absorbed"), (1.001, "expanded")):
            costs = PathCosts(0.0, 0.0, 0.0, factor * expanded / attention, 0.0, 0.0, 1.0)
            absorbed = counted(config, query_len, context_len, costs, element, 1)[0]
            assert (absorbed <= expanded) == (wanted == "absorbed")
            assert ops.choose_path(query_len, context_len, config, costs, STORED, dtype) == wanted
            lens = integers(query_len).cpu(), integers(context_len).cpu()
            together = ops.choose_paths(*lens, 0, config, costs, cache_format=STORED, dtype=dtype)
            assert together.tolist() == [wanted == "absorbed"]
    with pytest.raises(ValueError, match="^dtype: expected one of torch.bfloat16, torch.float32, got torch.float16$"):
        ops.choose_path(3, 1000, config, None, STORED, torch.float16)


def test_ends(ops):
    """One token with a long context gets the absorbed path, and a prompt without context gets the expanded path."""
    assert ops.choose_path(1, 4096, V3) == "absorbed"
    assert ops.choose_path(4096, 0, V3) == "expanded"
    assert ops.choose_path(0, 0, V3) == "absorbed"


def test_measured_path_costs(monkeypatch, tmp_path):
    """`measured_path_costs` reads the GPU's file whose number of heads is the nearest on a logarithmic scale."""
    from fast.mla import choose_path as path

    assert path.costs_file("NVIDIA H200", 16) == "h200-16.json"
    assert path.measured_path_costs(V3, "cpu") is None
    monkeypatch.setattr(path, "COSTS", tmp_path)
    for heads in (16, 128):
        PathCosts(byte=float(heads)).save(tmp_path / f"h200-{heads}.json")
    for name, heads, expected in (("NVIDIA H200", 128, 128), ("NVIDIA H200", 64, 128), ("NVIDIA H200", 8, 16),
                                  ("NVIDIA H200 NVL", 16, None), ("NVIDIA H20", 16, None)):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        found = path.measured_path_costs(MLAConfig.from_preset("deepseek-v3", num_heads=heads), "cuda")
        assert (found and found.byte) == expected


def test_shipped_costs():
    """With the costs of every shipped file, `choose_path` gives the paths that `test_ends` expects."""
    from fast.mla.choose_path import COSTS

    files = sorted(COSTS.glob("*.json"))
    assert files
    for path in files:
        costs = PathCosts.load(path)
        config = MLAConfig.from_preset("deepseek-v3", num_heads=int(path.stem.rsplit("-", 1)[1]))
        assert fast.choose_path(1, 4096, config, costs) == "absorbed"
        assert fast.choose_path(4096, 0, config, costs) == "expanded"


def test_costs(tmp_path, plain_errors):
    MEASURED.save(tmp_path / "costs.json")
    assert PathCosts.load(tmp_path / "costs.json") == MEASURED
    (tmp_path / "costs.json").write_text('{"byte": 1}')
    with pytest.raises(ValueError, match=r"^path: expected a file with absorbed_request, .*, got \['byte'\]$"):
        PathCosts.load(tmp_path / "costs.json")
    for place in range(7):
        for wrong in (-1.0, float("nan"), float("inf"), "1"):
            values = list(astuple(MEASURED))
            values[place] = wrong
            with pytest.raises(ValueError, match="^[a-z_]+: expected a number >= 0, got"):
                PathCosts(*values)


def test_a_query_token_sees_itself(ops):
    """Without context, q query tokens have q (q + 1) / 2 pairs (query, key), because each token sees itself."""
    config = V3
    pair = 2 * config.num_heads * (2 * config.kv_lora_rank + config.qk_rope_head_dim)
    for tokens, pairs in ((1, 1.0), (3, 6.0), (8, 36.0)):
        for factor, wanted in ((0.99, "expanded"), (1.01, "absorbed")):
            # a FLOP of absorbed attention costs 1, the expanded path has a constant cost, and all other costs are 0
            costs = PathCosts(0.0, factor * pairs * pair, 0.0, 1.0, 0.0, 0.0, 0.0)
            assert ops.choose_path(tokens, 0, config, costs) == wanted, (tokens, factor)
