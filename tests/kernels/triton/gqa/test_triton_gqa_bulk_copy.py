"""Tests of grouped-query attention whose tiles TMA, the GPU's bulk copy engine, loads (BULK_COPY).

On a Hopper GPU the kernels are compiled. Without a GPU, one test runs this file again in Triton's interpreter. The
launchers choose pointers there, so a fixture lets them choose descriptors, which the interpreter can read too.

The budgets are those of `fast.parity`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fast
import reference
from reference.interfaces.gqa import GQAConfig

from ....gqa.test_fast_attention import check_nan_stays, check_parity, doubled, verdict
from ....support.factories import assert_same_bits, offsets
from ....support.gqa import gqa_batch
from ....support.triton_mode import INTERPRETED, ON_GPU, run_in_interpreter, runs, starts_interpreter
from .test_triton_gqa import launched, on_device, triton  # noqa: F401  fixtures

if ON_GPU or INTERPRETED:
    from triton.tools.tensor_descriptor import TensorDescriptor

    from fast.kernels.triton.gqa import packed, paged, sizes

PLAIN = GQAConfig(16, 2, 128)
CONFIGS = {
    "plain": PLAIN,
    "window and sinks": replace(PLAIN, sliding_window=45, attention_sinks=True),
    "soft cap and ALiBi": replace(PLAIN, logits_soft_cap=1.1, alibi_slopes=tuple(2.0**-n for n in range(16))),
}
LENS = ((40, 300), (1, 20), (70, 70), (0, 9), (5, 130)) if ON_GPU else ((12, 150), (1, 20), (10, 10), (0, 9))
BLOCK = 64


@starts_interpreter
def test_in_the_interpreter():
    run_in_interpreter(__file__)


@pytest.fixture
def copies(monkeypatch):
    """Return a list that gets, for each launch, whether TMA loads its tiles."""
    if ON_GPU and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU with TMA")
    found = []

    def chosen(*given, **options):
        made = sizes.launch_sizes.__wrapped__(*given, **options)
        if INTERPRETED and made.shape.rows >= sizes.LEAST_COPIED_ROWS:
            made = made._replace(constants=made.constants._replace(BULK_COPY=True))
        return made

    def described(right):
        def boxes(k, v, constants):
            pair = right(k, v, constants)
            if INTERPRETED and pair[0] is not None:  # in the interpreter, a descriptor needs the tensor itself
                pair = tuple(
                    TensorDescriptor(x, list(x.shape), list(x.stride()), list(made.block_shape))
                    for x, made in zip((k, v), pair, strict=True)
                )
            found.append(pair[0] is not None)
            return pair

        return boxes

    for module in (paged, packed):
        monkeypatch.setattr(module, "launch_sizes", chosen)
        monkeypatch.setattr(module, "box_descriptors", described(module.box_descriptors))
    return found


def prompts(config=PLAIN, **options):
    """Return a batch in float16 with prefills, a decode and a request without query tokens."""
    return gqa_batch(config, LENS, BLOCK, torch.float16, **options)


@runs
@pytest.mark.parametrize("name, layout", list(zip(CONFIGS, ("HND", "NHD", "NHD"), strict=True)))
def test_features(name, layout, triton, copies):  # noqa: F811
    """Attend with every feature, beside freed blocks and memory that contains NaN -> within the budgets."""
    check_parity(prompts(CONFIGS[name], layout=layout, padding=3), backend=triton)
    assert copies == [True]


@runs
@pytest.mark.parametrize("name", CONFIGS if ON_GPU else ["window and sinks"])
def test_splits(name, triton, copies, monkeypatch):  # noqa: F811
    """Divide the requests into splits -> within the budgets."""
    monkeypatch.setattr(paged, "_num_splits", lambda *_: 3)
    check_parity(prompts(CONFIGS[name], padding=3), backend=triton)
    assert copies == [True]


@runs
@pytest.mark.parametrize("name", ["plain", "window and sinks"])
def test_nan_stays_in_its_request(name, triton, copies):  # noqa: F811
    check_nan_stays(prompts(CONFIGS[name]), (0, 2), triton)
    assert all(copies) and len(copies) == 3


@runs
def test_invalid_values_are_masked(copies):
    """Attend with invalid blocks and lengths -> the states of the backend "torch", which masks these keys."""
    batch = prompts(new_tokens=True)
    batch = replace(batch, kv_cache=batch.kv_cache.nan_to_num())  # longer lengths attend memory without tokens
    plan = batch.metadata
    table = plan.block_table.clone()
    table[0, 1], table[2, 0] = 2**31 - 1, -7
    long = dict(seq_lens=plan.seq_lens + 10**6, visible_lens=plan.visible_lens + 10**6, max_seq_len=10**9)
    for changes in (dict(block_table=table), long, dict(seq_lens=plan.seq_lens * 0 - 3)):
        launched(batch, replace(plan, **changes), torch.float16)
    assert all(copies) and len(copies) == 3


@runs
def test_cache_that_only_pointers_can_read(triton, copies):  # noqa: F811
    """Attend a cache whose columns do not follow each other -> pointers load the tiles, within the budgets."""
    batch = prompts()
    cache = torch.full((*batch.kv_cache.shape[:-1], 256), torch.nan, dtype=torch.float16)[..., ::2]
    cache.copy_(batch.kv_cache)
    check_parity(replace(batch, kv_cache=cache), backend=triton)
    assert copies == [False]


@runs
@pytest.mark.parametrize("name", CONFIGS if ON_GPU else ["window and sinks"])
def test_packed(name, triton, copies):  # noqa: F811
    """Attend packed keys -> within the budgets; a NaN in a request does not reach its neighbours."""
    config = replace(CONFIGS[name], attention_sinks=False)
    query_lens, key_lens = (20, 12, 9), (50, 70, 9)
    q, k, v = (torch.randn(sum(lens), heads, 128).half()
               for lens, heads in ((query_lens, 16), (key_lens, 2), (key_lens, 2)))  # fmt: skip
    arguments = q, k, v, offsets(query_lens), offsets(key_lens), 20, 70, config
    gold, low = reference.gqa_varlen_attention(*doubled(arguments)), reference.gqa_varlen_attention(*arguments)
    found = fast.gqa_varlen_attention(*arguments, backend=triton)
    verdict("gqa_varlen_attention", found, low, gold)
    k, v = k.clone(), v.clone()
    k[50:120], v[50:120] = torch.nan, torch.nan
    other = fast.gqa_varlen_attention(q, k, v, *arguments[3:], backend=triton)
    assert other.out[20:32].isnan().all()
    for rows in (slice(0, 20), slice(32, 41)):
        assert_same_bits(other.out[rows], found.out[rows])
        assert_same_bits(other.lse[:, rows], found.lse[:, rows])
    assert copies == [True, True]
