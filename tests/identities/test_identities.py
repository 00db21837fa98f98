"""Tier 2 of docs/correctness.md: identities that hold in float64 to about 1e-12, whatever the order of arithmetic.

No test compares `fast` with `reference`. Each check (a function `check_...`) gets a package as its argument `ops`. The
tests in tests/mutations call the checks with packages that have a planted mistake. "Pitfall 8" is entry 8 of the list
of faults in tests/__init__.py.

The letters of shapes: T query tokens, S keys of a request, N heads, H hidden size, Lkv latent width, P and R widths of
the parts of a head without rope and with rope, V value width.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch

import reference
from fast.parity import compare
from reference.interfaces import PRESETS, AttentionState, MLAConfig

from ..support.factories import (
    CONFIGS,
    DIRECT,
    HEADS,
    LOW_RANK,
    assert_close64,
    assert_same_bits,
    assert_states64,
    integers,
    last_rows,
    linear,
    make_batch,
    make_cache,
    make_entries,
    make_layer,
    make_up_projections,
    make_weights,
    norm,
    offsets,
    oracle_attention,
    oracle_layer,
    oracle_sdpa,
    preset,
    softmax_scale,
)
from ..support.planning import expanding_plan
from ..support.properties import given, st

F64 = torch.float64
SMALL = MLAConfig(16, 3, None, 8, 5, 4, 6)


def random64(*shape):
    return torch.randn(*shape, dtype=F64)


def random_state(tokens: int, heads: int, width: int, spread: float = 3.0) -> AttentionState:
    return AttentionState(random64(tokens, heads, width), spread * random64(heads, tokens))


# Attention, compared with exact sums.


def check_attention(ops, query_lens, key_lens, heads: int, causal: bool, width: int = 6, value: int = 4):
    """Compare output and LSE of packed attention with exact sums (pitfalls 1, 3 and 5).

    A row without keys must have output 0 and LSE -inf.
    """
    q, k, v = (
        random64(sum(query_lens), heads, width),
        random64(sum(key_lens), heads, width),
        random64(sum(key_lens), heads, value),
    )
    got = ops.flash_attn_varlen(
        q,
        k,
        v,
        offsets(query_lens),
        offsets(key_lens),
        max(query_lens, default=0),
        max(key_lens, default=0),
        0.7,
        causal,
    )
    parts = [
        oracle_attention(*three, 0.7, causal)
        for three in zip(q.split(query_lens), k.split(key_lens), v.split(key_lens), strict=True)
    ]
    out = torch.cat([part.out for part in parts] + [q.new_zeros(0, heads, value)])
    lse = torch.cat([part.lse for part in parts] + [q.new_zeros(heads, 0)], dim=1)
    assert_states64(got, AttentionState(out, lse))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "query_lens, key_lens",
    [
        ([3], [3]),
        ([1, 4, 2], [5, 4, 7]),
        ([2, 0, 3], [2, 3, 0]),  # request 1 has no queries, request 2 has no keys
        ([5], [2]),  # more queries than keys: the first rows attend no key
        ([0], [0]),
        ([], []),
    ],
)
def test_attention(ops, query_lens, key_lens, causal):
    """Attend requests, some without queries or without keys -> the exact sums (pitfalls 1, 3 and 5)."""
    check_attention(ops, query_lens, key_lens, 2, causal)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=4), st.booleans(), st.sampled_from([1, 3]))
def test_attention_any_lengths(lens, causal, heads):
    check_attention(reference, [q for q, _ in lens], [k for _, k in lens], heads, causal)


# Merge.


def check_merge(ops, tokens=7, heads=3, width=5):
    """Merge the attention states of three ranges of keys, in any order -> attention over all keys (pitfall 1)."""
    q, k, v = random64(tokens, heads, width), random64(20, heads, width), random64(20, heads, 4)

    def attention(keys):
        n = keys.stop - keys.start
        return ops.flash_attn_varlen(q, k[keys], v[keys], integers(0, tokens), integers(0, n), tokens, n, 0.9, False)

    parts = [attention(keys) for keys in (slice(0, 3), slice(3, 4), slice(4, 20))]
    whole = oracle_attention(q, k, v, 0.9, False)
    merge = ops.merge_attn_states
    assert_states64(merge(merge(parts[0], parts[1]), parts[2]), whole)
    assert_states64(merge(parts[0], merge(parts[1], parts[2])), whole)
    assert_states64(merge(merge(parts[2], parts[0]), parts[1]), whole)


@pytest.mark.parametrize("heads", [1, 3, 16])
def test_merge(ops, heads):
    """Merge attention states -> attention over all keys; the LSE is a natural logarithm (pitfall 1)."""
    check_merge(ops, heads=heads)


def test_merge_associates_and_commutes(ops):
    a, b, c = (random_state(9, 4, 6) for _ in range(3))
    b.lse[:, 3] = -torch.inf
    merge = ops.merge_attn_states
    assert_states64(merge(merge(a, b), c), merge(a, merge(b, c)))
    assert_states64(merge(a, b), merge(b, a))


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16, torch.float16])
def test_merge_identity(ops, dtype):
    """Merge a state with a state that has no keys -> the bits of the first state (pitfalls 2 and 3).

    If neither state has keys, the merged state has output 0 and LSE -inf.
    """
    state = random_state(6, 3, 5)
    state = AttentionState(state.out.to(dtype), state.lse.to(F64 if dtype == F64 else torch.float32))
    state.out[0, 0, 0] = -0.0
    empty = AttentionState(torch.zeros_like(state.out), torch.full_like(state.lse, -torch.inf))
    for merged in (ops.merge_attn_states(state, empty), ops.merge_attn_states(empty, state)):
        assert_same_bits(merged.out, state.out)
        assert_same_bits(merged.lse, state.lse)
    nothing = ops.merge_attn_states(empty, empty)
    assert nothing.out.eq(0).all() and nothing.lse.eq(-torch.inf).all()


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("other", [-torch.inf, 0.5, torch.inf, torch.nan])
def test_merge_refuses_to_hide(ops, bad, other):
    """Merge a state that has the LSE +inf or NaN in one row -> exactly this row of the result is NaN (pitfall 3).

    Some libraries give a row without keys the LSE +inf. Here the LSE of such a row is -inf, and +inf is an error.
    """
    a, b = random_state(4, 2, 3), random_state(4, 2, 3)
    a.lse[1, 2], b.lse[1, 2] = bad, other
    for merged in (ops.merge_attn_states(a, b), ops.merge_attn_states(b, a)):
        assert merged.out[2, 1].isnan().all() and merged.lse[1, 2].isnan()
        assert merged.lse.isnan().sum() == 1 and merged.out.isnan().sum() == 3


def check_merge_strides(ops):
    """Merge two states with different strides -> the same bits as with equal strides (pitfall 18).

    Different strides arise, for example, if one state is a slice of a padded tensor.
    """
    tokens, heads, width = 5, 3, 4
    a, b = random_state(tokens, heads, width), random_state(tokens, heads, width)
    wanted = ops.merge_attn_states(a, b)
    padded = torch.full((tokens, heads, width + 3), torch.nan, dtype=F64)
    padded[..., :width] = a.out
    by_head = b.out.transpose(0, 1).contiguous().transpose(0, 1)
    by_token = b.lse.T.contiguous().T
    got = ops.merge_attn_states(AttentionState(padded[..., :width], a.lse), AttentionState(by_head, by_token))
    assert_same_bits(got.out.contiguous(), wanted.out.contiguous())
    assert_same_bits(got.lse.contiguous(), wanted.lse.contiguous())


def test_merge_strides(ops):
    """Merge two states with different strides -> the same bits as with equal strides (pitfall 18)."""
    check_merge_strides(ops)


def test_merge_keeps_extremes(ops):
    """Merge states with LSEs of +-1e4 and +-800 -> exact results.

    A merge must subtract the larger LSE before it computes exponentials; otherwise exp(LSE) overflows.
    """
    a, b = random_state(3, 2, 4), random_state(3, 2, 4)
    a.lse[:] = torch.tensor([[1e4, -1e4, 800.0]] * 2, dtype=F64)
    b.lse[:] = torch.tensor([[1e4, -1e4, -800.0]] * 2, dtype=F64)
    merged = ops.merge_attn_states(a, b)
    assert_close64(merged.out[:2], (a.out[:2] + b.out[:2]) / 2)
    assert_close64(merged.out[2], a.out[2])
    assert_close64(
        merged.lse,
        torch.tensor([[1e4, -1e4, 800.0]] * 2, dtype=F64) + torch.tensor(2.0).log() * torch.tensor([1, 1, 0]),
    )


# The absorbed path attends over the cached latents themselves. The expanded path first computes keys and values of
# every head from the latents.


def expanded_inputs(config: MLAConfig, batch, entries, dtype=F64):
    """Return q [T, N, P + R], kv_c [T, Lkv] and k_pe [T, R] of the new tokens, and the up-projections W_UK and W_UV."""
    q = random64(batch.num_tokens, config.num_heads, config.qk_head_dim).to(dtype)
    new = last_rows(batch, entries).view(-1, config.head_size)
    return q, new[:, : config.kv_lora_rank], new[:, config.kv_lora_rank :], *make_up_projections(config, dtype)


def decode(ops, config, q, w_uk, w_uv, cache, metadata) -> AttentionState:
    """Return the attention state of the absorbed path; the output is projected to values, [T, N, V]."""
    w_uk_t, w_uv_absorbed = ops.absorb(w_uk, w_uv)
    ql_nope = ops.query_to_latent(q[..., : config.qk_nope_head_dim], w_uk_t)
    state = ops.mla_decode(ql_nope, q[..., config.qk_nope_head_dim :], cache, metadata, config.softmax_scale)
    return AttentionState(ops.latent_to_value(state.out, w_uv_absorbed), state.lse)


def whole(config, q, w_uk, w_uv, entries, query_lens, dtype=F64) -> torch.Tensor:
    """Return causal attention over the whole sequence of each request, [T, N, V], computed by PyTorch in `dtype`."""
    outs = []
    for rows, own in zip(q.split(query_lens), entries, strict=True):
        latent, k_pe = own.to(dtype).split([config.kv_lora_rank, config.qk_rope_head_dim], -1)
        k_nope, v = (torch.einsum("sl,lnd->snd", latent, w.to(dtype)) for w in (w_uk, w_uv))
        k = torch.cat((k_nope, k_pe[:, None].expand(-1, config.num_heads, -1)), -1)
        outs.append(oracle_sdpa(rows, k, v, softmax_scale(config), dtype))
    return torch.cat(outs)


def check_absorbed_is_expanded(ops, config: MLAConfig, query_lens, seq_lens, block_size=16):
    """Attend a batch on both paths -> equal states, and outputs equal to those of PyTorch's attention.

    The absorbed path is `mla_decode` and `latent_to_value`; the expanded path is `forward_prefill`.
    """
    batch = make_batch(query_lens, seq_lens, block_size)
    entries = make_entries(batch, config.head_size, F64)
    q, kv_c, k_pe, w_uk, w_uv = expanded_inputs(config, batch, entries)
    absorbing = ops.build_mla_metadata(batch.common, block_size, 4096, decode_threshold=max(query_lens))
    assert absorbing.num_prefills == 0
    absorbed = decode(ops, config, q, w_uk, w_uv, make_cache(batch, entries, config.head_size, F64), absorbing.decode)
    plan = expanding_plan(ops, batch, 4096)
    context = make_cache(batch, entries, config.head_size, F64, new_tokens=False)
    expanded = ops.forward_prefill(q, kv_c, k_pe, context, plan, w_uk, w_uv, config.softmax_scale)
    assert_states64(absorbed, expanded)
    assert_close64(absorbed.out, whole(config, q, w_uk, w_uv, entries, query_lens))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_absorbed_is_expanded(ops, config):
    check_absorbed_is_expanded(ops, config, [1, 3, 1, 2], [1, 17, 16, 31])


@pytest.mark.parametrize("heads", HEADS)
def test_absorbed_is_expanded_for_heads(ops, heads):
    check_absorbed_is_expanded(ops, replace(SMALL, num_heads=heads), [1, 2], [15, 7])


@pytest.mark.parametrize("name", PRESETS)
def test_absorbed_is_expanded_for_presets(name):
    check_absorbed_is_expanded(reference, preset(name), [1], [3])


def check_chunked_is_whole(ops, config, query_lens, context_lens, workspace, block_size, dtype=F64):
    """Prefill with a context in chunks -> attention over the whole sequence; return the number of chunks.

    In float64 the results agree up to rounding. In a lower dtype the error must be within a budget, which is computed
    from the error of PyTorch's attention in this dtype.
    """
    seq_lens = [q + c for q, c in zip(query_lens, context_lens, strict=True)]
    batch = make_batch(query_lens, seq_lens, block_size)
    entries = make_entries(batch, config.head_size, dtype)
    q, kv_c, k_pe, w_uk, w_uv = expanded_inputs(config, batch, entries, dtype)
    plan = expanding_plan(ops, batch, workspace)
    cache = make_cache(batch, entries, config.head_size, dtype, new_tokens=False)
    state = ops.forward_prefill(q, kv_c, k_pe, cache, plan, w_uk, w_uv, config.softmax_scale)
    gold = whole(config, q, w_uk, w_uv, entries, query_lens)
    if dtype == F64:
        assert_close64(state.out, gold)
    else:
        parity = compare("prefill", state.out, whole(config, q, w_uk, w_uv, entries, query_lens, dtype), gold)
        assert parity.passed, parity
    return len(plan.context_chunks)


@given(
    st.lists(st.tuples(st.integers(1, 5), st.sampled_from([0, 1, 3, 4, 5, 13, 29])), min_size=1, max_size=4),
    st.integers(0, 20),
    st.sampled_from([1, 4, 16]),
)
def test_chunked_is_whole(lens, extra, block_size):
    """Prefill with planned chunks, for workspaces of many sizes -> attention over the whole sequence."""
    workspace = len(lens) * block_size + extra
    check_chunked_is_whole(reference, SMALL, [q for q, _ in lens], [c for _, c in lens], workspace, block_size)


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_chunked_is_whole_in_many_chunks(ops, dtype):
    assert check_chunked_is_whole(ops, LOW_RANK, [3, 1, 7], [97, 0, 31], 32, 16, dtype) == 5


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_any_cut_of_the_context(cuts):
    """Cut the context of a request into any chunks, also empty chunks -> attention over the whole sequence."""
    context = sum(cuts)
    batch = make_batch([2], [context + 2], 4)
    entries = make_entries(batch, SMALL.head_size, F64)
    q, kv_c, k_pe, w_uk, w_uv = expanded_inputs(SMALL, batch, entries)
    starts = offsets(cuts)
    chunks = tuple(
        reference.ContextChunk(starts[i : i + 1], integers(0, cuts[i]), cuts[i], cuts[i]) for i in range(len(cuts))
    )
    plan = replace(expanding_plan(reference, batch, 4096), context_chunks=chunks)
    cache = make_cache(batch, entries, SMALL.head_size, F64, new_tokens=False)
    state = reference.forward_prefill(q, kv_c, k_pe, cache, plan, w_uk, w_uv, SMALL.softmax_scale)
    assert_close64(state.out, whole(SMALL, q, w_uk, w_uv, entries, [2]))


def check_several_queries(ops, config=DIRECT):
    """Decode several query tokens of a request together -> each token attends only the tokens before it and itself.

    The states must equal exact attention of each token alone (pitfall 12).
    """
    query_lens, seq_lens = [4, 1, 0, 3], [20, 16, 9, 3]
    batch = make_batch(query_lens, seq_lens)
    entries = make_entries(batch, config.head_size, F64)
    cache = make_cache(batch, entries, config.head_size, F64)
    ql, q_pe = (
        random64(8, config.num_heads, config.kv_lora_rank),
        random64(8, config.num_heads, config.qk_rope_head_dim),
    )
    plan = ops.build_mla_metadata(batch.common, 16, 64, 4).decode
    together = ops.mla_decode(ql, q_pe, cache, plan, config.softmax_scale)
    row = 0
    for request, (query_len, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for ahead in range(query_len):
            seen = length - (query_len - 1 - ahead)
            k = entries[request][:seen, None].expand(-1, config.num_heads, -1)
            alone = oracle_attention(
                torch.cat((ql, q_pe), -1)[row : row + 1], k, k[..., : config.kv_lora_rank], softmax_scale(config), False
            )
            assert_states64(AttentionState(together.out[row : row + 1], together.lse[:, row : row + 1]), alone)
            row += 1


def test_several_queries(ops):
    """Decode several query tokens of a request together -> no token attends later tokens (pitfall 12)."""
    check_several_queries(ops)


def check_batch_composition(ops, config=LOW_RANK):
    """Decode requests in a batch, and each request alone with another block size -> the same states."""
    batch = make_batch([1, 2, 1, 1], [33, 16, 0, 1])
    entries = make_entries(batch, config.head_size, F64)
    ql, q_pe = (
        random64(5, config.num_heads, config.kv_lora_rank),
        random64(5, config.num_heads, config.qk_rope_head_dim),
    )
    plan = ops.build_mla_metadata(batch.common, 16, 64, 2).decode
    cache = make_cache(batch, entries, config.head_size, F64)
    together = ops.mla_decode(ql, q_pe, cache, plan, config.softmax_scale)
    for request in range(4):
        rows = slice(int(plan.query_start_loc[request]), int(plan.query_start_loc[request + 1]))
        alone = make_batch([batch.query_lens[request]], [batch.seq_lens[request]], 8)
        cache = make_cache(alone, [entries[request]], config.head_size, F64)
        alone_plan = ops.build_mla_metadata(alone.common, 8, 64, 2).decode
        state = ops.mla_decode(ql[rows], q_pe[rows], cache, alone_plan, config.softmax_scale)
        assert_states64(AttentionState(together.out[rows], together.lse[:, rows]), state)


def test_batch_composition(ops):
    check_batch_composition(ops)


def test_schedule_and_hints_change_nothing(ops):
    """Decode with two values of `max_query_len`, which determines only launch sizes -> the same bits."""
    batch = make_batch([1, 2], [9, 20])
    entries = make_entries(batch, DIRECT.head_size, F64)
    cache = make_cache(batch, entries, DIRECT.head_size, F64)
    plan = ops.build_mla_metadata(batch.common, 16, 64, 2).decode
    ql, q_pe = random64(3, 3, 24), random64(3, 3, 8)
    states = [
        ops.mla_decode(ql, q_pe, cache, dataclasses.replace(plan, max_query_len=longest), 0.3) for longest in (2, 64)
    ]
    assert_same_bits(states[0].out, states[1].out)
    assert_same_bits(states[0].lse, states[1].lse)


# The layer.


def run_steps(ops, config, weights, hiddens, steps, block_size=16, workspace=64, threshold=1, **options):
    """Serve requests step by step over one cache.

    Args:
        ops: package under test.
        config: dimensions of the layer.
        weights: weights of the layer.
        hiddens: hidden states [S, H] of each request.
        steps: for each step, the number of new tokens of each request.
        block_size: tokens of a block.
        workspace: number of context tokens that a prefill expands at once.
        threshold: largest number of new tokens with which a request is a decode.
        options: further arguments of the layer.

    Returns:
        The outputs [S, H] of each request, the cache and the batch of all tokens.
    """
    layer = make_layer(ops, config, weights, F64, **options)
    totals = [len(h) for h in hiddens]
    full = make_batch([0] * len(totals), totals, block_size)
    cache = torch.full((full.num_blocks, block_size, config.head_size), torch.nan, dtype=F64)
    done, outputs = [0] * len(totals), [[] for _ in totals]
    for step in steps:
        # decodes come first
        order = sorted(range(len(totals)), key=lambda r: (step[r] > threshold, r))
        lens, after = [step[r] for r in order], [done[r] + step[r] for r in order]
        table = full.common.block_table[order]
        starts = offsets(lens)
        slots = ops.slot_mapping(starts, integers(*after), table, block_size, sum(lens) + 2)
        common = reference.CommonAttentionMetadata.make(starts.cpu(), integers(*after).cpu(), table, slots)
        rows = [hiddens[r][done[r] : done[r] + step[r]] for r in order]
        positions = torch.tensor([p for r in order for p in range(done[r], done[r] + step[r])] + [0, 0])
        hidden = torch.cat([*rows, random64(2, config.hidden_size)])
        out = layer(hidden, positions, cache, ops.build_mla_metadata(common, block_size, workspace, threshold))
        assert out[sum(lens) :].eq(0).all(), "the output of padding tokens is not 0"
        for r, own in zip(order, out[: sum(lens)].split(lens), strict=True):
            outputs[r].append(own)
            done[r] += step[r]
    assert done == totals
    return [torch.cat(own) for own in outputs], cache, full


def check_layer(ops, config, steps, **options):
    """Run a layer in steps -> the outputs of plain attention over whole sequences.

    The layer must write only cache entries that belong to a token.
    """
    weights = make_weights(config, F64)
    totals = [sum(step[r] for step in steps) for r in range(len(steps[0]))]
    hiddens = [random64(total, config.hidden_size) for total in totals]
    with torch.no_grad():
        outputs, cache, full = run_steps(ops, config, weights, hiddens, steps, **options)
    for hidden, got in zip(hiddens, outputs, strict=True):
        assert_close64(got, oracle_layer(config, weights, hidden))
    owned = {slot for own in full.slots for slot in own}
    for block in range(full.num_blocks):
        for at in range(full.block_size):
            assert cache[block, at].isnan().any().item() is ((block, at) not in owned)


STEPS = {
    "prefill": [(7, 20)],
    "token by token": [(1, 1)] * 5,
    "chunked prefill": [(16, 5), (17, 30), (4, 0)],
    "mixed": [(9, 1), (1, 12), (1, 1), (3, 17), (1, 0), (0, 2)],
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_layer(ops, config, steps):
    """Run a layer in many kinds of steps, such as mixed steps -> the outputs of attention over whole sequences.

    The test detects pitfalls 14 and 15.
    """
    check_layer(ops, config, steps)


def test_layer_with_short_queries_absorbed(ops):
    """Let requests with up to three query tokens be decodes -> the outputs of attention over whole sequences."""
    check_layer(ops, DIRECT, [(3, 2), (1, 3), (2, 2), (9, 3)], threshold=3)


@pytest.mark.parametrize("name", PRESETS)
def test_layer_with_preset_head_dims(name):
    config = preset(name)
    lora = None if config.q_lora_rank is None else 24
    check_layer(reference, replace(config, hidden_size=32, num_heads=3, q_lora_rank=lora), [(4, 1), (1, 2), (1, 1)])


@pytest.mark.parametrize("scale", [0.05, -0.7, 0])
@pytest.mark.parametrize("config", [DIRECT, LOW_RANK], ids=["direct", "low-rank"])
def test_layer_with_a_given_scale(ops, config, scale):
    """Give a config a softmax scale -> both attention paths use it in place of the scale that the config computes."""
    given_scale = replace(config, softmax_scale=scale)
    assert given_scale.softmax_scale == scale != config.softmax_scale
    check_layer(ops, given_scale, STEPS["mixed"])


def test_memory_profile_run(ops):
    """Call a layer with `metadata=None`, as engines do to measure memory -> zeros, and an unchanged cache."""
    layer = make_layer(ops, DIRECT, make_weights(DIRECT, F64), F64, workspace_tokens=128)
    cache = torch.randn(2, 16, DIRECT.head_size, dtype=F64)
    was = cache.clone()
    out = layer(random64(5, DIRECT.hidden_size), torch.arange(5), cache, None)
    assert out.shape == (5, DIRECT.hidden_size) and out.eq(0).all()
    assert_same_bits(cache, was)
    with pytest.raises((ValueError, TypeError), match="positions|Type-check"):
        layer(random64(5, DIRECT.hidden_size), torch.arange(4), cache, None)


def test_layer_with_an_empty_batch(ops):
    layer = make_layer(ops, DIRECT, make_weights(DIRECT, F64), F64)
    plan = ops.build_mla_metadata(make_batch((), ()).common, 16, 64)
    out = layer(random64(0, DIRECT.hidden_size), torch.arange(0), torch.empty(2, 16, DIRECT.head_size, dtype=F64), plan)
    assert out.shape == (0, DIRECT.hidden_size)


def test_rms_norm(ops):
    x, weight = random64(5, 7), random64(7)
    wanted = torch.stack([weight * row / (row.dot(row) / 7 + 1e-5).sqrt() for row in x])
    assert_close64(ops.rms_norm(x, weight, 1e-5), wanted)
    tiny = ops.rms_norm(1e-4 * x, weight, 1e-5)  # epsilon is far larger than the mean square
    assert_close64(tiny, torch.stack([weight * row / (row.dot(row) / 7 + 1e-5).sqrt() for row in 1e-4 * x]))


def test_layer_constructor_refuses(ops, plain_errors):
    weights = make_weights(DIRECT, F64)
    modules = {name: linear(w) if w.dim() == 2 else norm(w) for name, w in weights.items()}
    with pytest.raises(ValueError, match="^q_proj: expected q_proj for q_lora_rank None, got None$"):
        ops.MLAAttention(DIRECT, **(modules | {"q_proj": None}))
    with pytest.raises(ValueError, match="^q_proj: expected q_a_proj, q_a_layernorm, q_b_proj for .* 20, got q_proj$"):
        ops.MLAAttention(LOW_RANK, **modules)


def test_inputs_were_not_degenerate():
    """Make test inputs with the helpers of `factories` -> different cache entries, no constant weights (pitfall 21)."""
    batch = make_batch((1, 2), (18, 5))
    entries = make_entries(batch, 20, torch.bfloat16)
    for own in entries:
        assert own.abs().amin(1).isfinite().all() and own.std() > 0.5
        assert len({tuple(row.tolist()) for row in own}) == len(own)
    cache = make_cache(batch, entries, 20, torch.bfloat16)
    assert cache.isnan().any(-1).sum() == batch.num_blocks * 16 - 23
    weights = make_weights(LOW_RANK, torch.float32)
    assert all(w.std() > 0.01 for w in weights.values())
