"""Tests of bad input: a function raises an error of one line and writes nothing.

The line is "argument: expected ..., got ...".
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import reference
from reference.interfaces import (
    AttentionState,
    CommonAttentionMetadata,
    DecodeMetadata,
    DecodeSchedule,
    PrefillMetadata,
)

from ..support.factories import (
    DIRECT,
    assert_same_bits,
    integers,
    make_batch,
    make_cache,
    make_entries,
    make_layer,
    make_up_projections,
    make_weights,
    offsets,
)

pytestmark = pytest.mark.usefixtures("plain_errors")


def refuses(call, argument: str, *written: torch.Tensor):
    """Assert that a call raises an error of one line that begins with `argument`, and changes no tensor in `written`.

    Args:
        call: function without arguments that makes the call.
        argument: name of the bad argument.
        written: tensors that a valid call would write.
    """
    before = [t.clone() for t in written]
    with pytest.raises((ValueError, TypeError)) as error:
        call()
    message = str(error.value)
    assert "\n" not in message and message.startswith(f"{argument}: expected "), message
    assert ", got " in message, message
    for tensor, was in zip(written, before, strict=True):
        assert_same_bits(tensor, was)


def meta(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor like `t` on the meta device."""
    return t.to("meta")


# Tests of calls with one bad argument. A case of BAD has four items: the name of the called function, the name of the
# bad argument, a function that makes the argument bad, and the name at the beginning of the message.


def arguments():
    """Return valid arguments for each function under test, by the name of the function."""
    batch = make_batch([1, 2, 3], [20, 33, 16])
    entries = make_entries(batch, DIRECT.head_size, torch.float32)
    cache = make_cache(batch, entries, DIRECT.head_size, torch.float32)
    plan = reference.build_mla_metadata(batch.common, 16, 4096, 8).decode
    chunks = reference.plan_context_chunks(integers(*batch.context_lens), 64, 16)
    prefill = PrefillMetadata(batch.common.block_table, batch.common.query_start_loc, 3, chunks, 16)
    w_uk, w_uv = make_up_projections(DIRECT, torch.float32)
    state = AttentionState(torch.randn(6, 3, 5), torch.randn(3, 6))
    other = AttentionState(torch.randn(6, 3, 5), torch.randn(3, 6))
    common = batch.common
    return {
        "concat_and_cache_mla": dict(
            kv_c_normed=torch.randn(6, 24), k_pe=torch.randn(6, 8), kv_cache=cache, slot_mapping=common.slot_mapping
        ),
        "gather_and_maybe_dequant_cache": dict(
            kv_cache=cache, block_table=common.block_table, cu_seq_lens=offsets([20, 3, 0]), starts=integers(0, 16, 0),
            num_tokens=23,
        ),
        "copy_blocks": dict(kv_caches=list(torch.randn(2, 4, 2, 3)), block_mapping=torch.tensor([[0, 1]])),
        "swap_blocks": dict(
            source=torch.randn(4, 2, 3), target=torch.randn(5, 2, 3), block_mapping=torch.tensor([[0, 4]])
        ),
        "slot_mapping": dict(
            query_start_loc=common.query_start_loc, seq_lens=common.seq_lens, block_table=common.block_table,
            block_size=16, num_tokens=6,
        ),
        "flash_attn_varlen": dict(
            q=torch.randn(6, 3, 8), k=torch.randn(7, 3, 8), v=torch.randn(7, 3, 5), cu_seqlens_q=offsets([4, 2]),
            cu_seqlens_k=offsets([5, 2]), max_seqlen_q=4, max_seqlen_k=5, softmax_scale=0.3, causal=True,
        ),
        "merge_attn_states": dict(prefix=state, suffix=other),
        "mla_decode": dict(
            ql_nope=torch.randn(6, 3, 24), q_pe=torch.randn(6, 3, 8), kv_cache=cache, metadata=plan, softmax_scale=0.3
        ),
        "forward_prefill": dict(
            q=torch.randn(6, 3, 20), kv_c_normed=torch.randn(6, 24), k_pe=torch.randn(6, 8), kv_cache=cache,
            metadata=prefill, w_uk=w_uk, w_uv=w_uv, softmax_scale=0.3,
        ),
        "apply_rope": dict(
            positions=torch.arange(6), q_pe=torch.randn(6, 3, 8), k_pe=torch.randn(6, 8), rope=DIRECT.rope
        ),
        "plan_context_chunks": dict(context_lens=integers(20, 0, 33), workspace_tokens=64, block_size=16),
        "split_decodes_and_prefills": dict(common=common),
        "build_mla_metadata": dict(common=common, block_size=16, workspace_tokens=64),
        "absorb": dict(w_uk=w_uk, w_uv=w_uv),
        "query_to_latent": dict(q_nope=torch.randn(6, 3, 12), w_uk_t=torch.randn(3, 12, 24)),
        "latent_to_value": dict(latent=torch.randn(6, 3, 24), w_uv=torch.randn(3, 24, 10)),
        "expand_kv": dict(kv_c_normed=torch.randn(6, 24), w_uk=w_uk, w_uv=w_uv),
        "rms_norm": dict(x=torch.randn(6, 24), weight=torch.rand(24), eps=1e-6),
        "rotate": dict(x=torch.randn(6, 3, 8), cos=torch.randn(6, 4), sin=torch.randn(6, 4), interleaved=True),
        "rotary_cos_sin": dict(positions=torch.arange(6), rope=DIRECT.rope, dim=8, dtype=torch.float32),
        "split_kv_b_proj": dict(kv_b_weight=torch.randn(66, 24), num_heads=3, qk_nope_head_dim=12, v_head_dim=10),
    }  # fmt: skip


def field(name, change):
    """Return a function that applies `change` to one field of a dataclass."""
    return lambda value: replace(value, **{name: change(getattr(value, name))})


half, rank, short = torch.Tensor.half, lambda t: t[None], lambda t: t[:-1]
narrow, int64 = lambda t: t[..., :-1].contiguous(), torch.Tensor.long


def put(index, value):
    def change(t):
        t = t.clone()
        t[index] = value
        return t

    return change


BAD = [
    ("absorb", "w_uk", rank, "w_uk"),
    ("absorb", "w_uv", short, "w_uv"),
    ("query_to_latent", "q_nope", rank, "q_nope"),
    ("query_to_latent", "w_uk_t", half, "w_uk_t"),
    ("query_to_latent", "w_uk_t", short, "w_uk_t"),
    ("latent_to_value", "latent", rank, "latent"),
    ("latent_to_value", "w_uv", meta, "w_uv"),
    ("expand_kv", "kv_c_normed", rank, "kv_c_normed"),
    ("expand_kv", "w_uk", short, "w_uk"),
    ("expand_kv", "w_uv", half, "w_uv"),
    ("rms_norm", "x", rank, "x"),
    ("rms_norm", "weight", short, "weight"),
    ("rotate", "x", rank, "x"),
    ("rotate", "cos", short, "cos"),
    ("rotate", "sin", half, "sin"),
    ("rotary_cos_sin", "positions", rank, "positions"),
    ("rotary_cos_sin", "dim", lambda dim: dim - 1, "dim"),
    ("concat_and_cache_mla", "kv_c_normed", rank, "kv_c_normed"),
    ("concat_and_cache_mla", "kv_c_normed", lambda t: t.tolist(), "kv_c_normed"),
    ("concat_and_cache_mla", "kv_c_normed", int64, "kv_c_normed"),
    ("concat_and_cache_mla", "k_pe", short, "k_pe"),
    ("concat_and_cache_mla", "k_pe", half, "k_pe"),
    ("concat_and_cache_mla", "k_pe", meta, "k_pe"),
    ("concat_and_cache_mla", "kv_cache", rank, "kv_cache"),
    ("concat_and_cache_mla", "kv_cache", narrow, "kv_cache"),
    ("concat_and_cache_mla", "kv_cache", half, "kv_cache"),
    ("concat_and_cache_mla", "kv_cache", meta, "kv_cache"),
    ("concat_and_cache_mla", "slot_mapping", torch.Tensor.int, "slot_mapping"),
    ("concat_and_cache_mla", "slot_mapping", short, "slot_mapping"),
    ("concat_and_cache_mla", "slot_mapping", put(5, 10_000), "slot_mapping"),
    ("concat_and_cache_mla", "slot_mapping", put(5, 2**40), "slot_mapping"),
    ("concat_and_cache_mla", "slot_mapping", put(5, -2), "slot_mapping"),
    ("gather_and_maybe_dequant_cache", "kv_cache", rank, "kv_cache"),
    ("gather_and_maybe_dequant_cache", "kv_cache", int64, "kv_cache"),
    ("gather_and_maybe_dequant_cache", "block_table", int64, "block_table"),
    ("gather_and_maybe_dequant_cache", "block_table", meta, "block_table"),
    ("gather_and_maybe_dequant_cache", "block_table", put((0, 1), 99), "block_table"),
    ("gather_and_maybe_dequant_cache", "block_table", put((0, 1), -1), "block_table"),
    ("gather_and_maybe_dequant_cache", "block_table", lambda t: t[:, :1], "block_table"),
    ("gather_and_maybe_dequant_cache", "cu_seq_lens", short, "cu_seq_lens"),
    ("gather_and_maybe_dequant_cache", "cu_seq_lens", lambda t: integers(0, 24, 23, 23), "cu_seq_lens"),
    ("gather_and_maybe_dequant_cache", "cu_seq_lens", lambda t: integers(1, 20, 23, 23), "cu_seq_lens"),
    ("gather_and_maybe_dequant_cache", "num_tokens", lambda n: n + 1, "cu_seq_lens"),
    ("gather_and_maybe_dequant_cache", "num_tokens", lambda n: -1, "num_tokens"),
    ("gather_and_maybe_dequant_cache", "starts", int64, "starts"),
    ("gather_and_maybe_dequant_cache", "starts", put(1, -16), "starts"),
    ("copy_blocks", "block_mapping", torch.Tensor.int, "block_mapping"),
    ("copy_blocks", "block_mapping", lambda t: t[0], "block_mapping"),
    ("copy_blocks", "block_mapping", lambda t: torch.tensor([[0, 1], [0, 4]]), "block_mapping"),
    ("copy_blocks", "block_mapping", lambda t: torch.tensor([[0, 1], [-1, 2]]), "block_mapping"),
    ("copy_blocks", "block_mapping", lambda t: torch.tensor([[0, 1], [2, 1]]), "block_mapping"),
    ("copy_blocks", "block_mapping", lambda t: torch.tensor([[0, 1], [1, 2]]), "block_mapping"),
    ("copy_blocks", "kv_caches", lambda c: [c[0], c[1][0]], "kv_caches"),
    ("copy_blocks", "kv_caches", lambda c: [c[0], c[1][:1]], "block_mapping"),
    ("swap_blocks", "target", narrow, "target"),
    ("swap_blocks", "target", half, "target"),
    ("swap_blocks", "source", rank, "source"),
    ("swap_blocks", "block_mapping", lambda t: torch.tensor([[0, 1], [1, 5]]), "block_mapping"),
    ("swap_blocks", "block_mapping", lambda t: torch.tensor([[0, 1], [4, 2]]), "block_mapping"),
    ("slot_mapping", "block_table", int64, "block_table"),
    ("slot_mapping", "block_table", lambda t: t[:, :2], "block_table"),
    ("slot_mapping", "seq_lens", short, "seq_lens"),
    ("slot_mapping", "seq_lens", meta, "seq_lens"),
    ("slot_mapping", "seq_lens", put(2, 2), "seq_lens"),
    ("slot_mapping", "seq_lens", put(2, -1), "seq_lens"),
    ("slot_mapping", "query_start_loc", int64, "query_start_loc"),
    ("slot_mapping", "query_start_loc", lambda t: integers(0, 3, 1, 6), "query_start_loc"),
    ("slot_mapping", "num_tokens", lambda n: n - 1, "num_tokens"),
    ("flash_attn_varlen", "q", rank, "q"),
    ("flash_attn_varlen", "q", int64, "q"),
    ("flash_attn_varlen", "k", narrow, "k"),
    ("flash_attn_varlen", "k", lambda t: t[:, :2], "k"),
    ("flash_attn_varlen", "k", half, "k"),
    ("flash_attn_varlen", "k", meta, "k"),
    ("flash_attn_varlen", "v", short, "v"),
    ("flash_attn_varlen", "v", half, "v"),
    ("flash_attn_varlen", "cu_seqlens_q", int64, "cu_seqlens_q"),
    ("flash_attn_varlen", "cu_seqlens_q", lambda t: integers(0, 7, 6), "cu_seqlens_q"),
    ("flash_attn_varlen", "cu_seqlens_q", lambda t: integers(0, 4, 5), "cu_seqlens_q"),
    ("flash_attn_varlen", "cu_seqlens_k", lambda t: integers(0, 5, 9), "cu_seqlens_k"),
    ("flash_attn_varlen", "cu_seqlens_k", short, "cu_seqlens_k"),
    ("merge_attn_states", "prefix", field("lse", lambda t: t.T), "prefix.lse"),
    ("merge_attn_states", "prefix", field("lse", torch.Tensor.bfloat16), "prefix.lse"),
    ("merge_attn_states", "prefix", field("out", rank), "prefix.out"),
    ("merge_attn_states", "suffix", field("lse", torch.Tensor.double), "suffix.lse"),
    ("merge_attn_states", "suffix", field("out", narrow), "suffix.out"),
    ("merge_attn_states", "suffix", field("out", half), "suffix.out"),
    ("mla_decode", "ql_nope", rank, "ql_nope"),
    ("mla_decode", "ql_nope", int64, "ql_nope"),
    ("mla_decode", "q_pe", short, "q_pe"),
    ("mla_decode", "q_pe", half, "q_pe"),
    ("mla_decode", "q_pe", meta, "q_pe"),
    ("mla_decode", "kv_cache", narrow, "kv_cache"),
    ("mla_decode", "kv_cache", half, "kv_cache"),
    ("mla_decode", "metadata", field("seq_lens", int64), "metadata.seq_lens"),
    ("mla_decode", "metadata", field("block_table", short), "metadata.block_table"),
    ("mla_decode", "metadata", field("block_table", put((1, 2), 99)), "metadata.block_table"),
    ("mla_decode", "metadata", field("block_table", put((1, 2), -1)), "metadata.block_table"),
    ("mla_decode", "metadata", field("query_start_loc", short), "metadata.query_start_loc"),
    ("mla_decode", "metadata", field("query_start_loc", put(1, 5)), "metadata.query_start_loc"),
    ("mla_decode", "metadata", field("query_start_loc", put(3, 5)), "metadata.query_start_loc"),
    ("mla_decode", "metadata", field("seq_lens", put(2, 2)), "metadata.visible_lens"),
    ("mla_decode", "metadata", field("visible_lens", short), "metadata.visible_lens"),
    ("mla_decode", "metadata", field("visible_lens", int64), "metadata.visible_lens"),
    ("mla_decode", "metadata", field("visible_lens", put(0, 21)), "metadata.visible_lens"),
    ("mla_decode", "metadata", field("visible_lens", put(0, -1)), "metadata.visible_lens"),
    ("forward_prefill", "q", rank, "q"),
    ("forward_prefill", "q", half, "k_pe"),
    ("forward_prefill", "kv_c_normed", short, "kv_c_normed"),
    ("forward_prefill", "k_pe", half, "k_pe"),
    ("forward_prefill", "kv_cache", narrow, "kv_cache"),
    ("forward_prefill", "kv_cache", meta, "kv_cache"),
    ("forward_prefill", "w_uk", narrow, "w_uk"),
    ("forward_prefill", "w_uv", half, "w_uv"),
    ("forward_prefill", "metadata", field("query_start_loc", short), "metadata.query_start_loc"),
    ("forward_prefill", "metadata", field("block_table", put((1, 0), 99)), "block_table"),
    ("apply_rope", "q_pe", rank, "q_pe"),
    ("apply_rope", "k_pe", narrow, "k_pe"),
    ("apply_rope", "k_pe", half, "k_pe"),
    ("apply_rope", "positions", short, "positions"),
    ("apply_rope", "positions", torch.Tensor.float, "positions"),
    ("apply_rope", "positions", meta, "positions"),
    ("plan_context_chunks", "context_lens", int64, "context_lens"),
    ("plan_context_chunks", "context_lens", meta, "context_lens"),
    ("plan_context_chunks", "context_lens", put(1, -1), "context_lens"),
    ("plan_context_chunks", "workspace_tokens", lambda n: 15, "workspace_tokens"),
    ("plan_context_chunks", "block_size", lambda n: 0, "block_size"),
    ("split_decodes_and_prefills", "common", lambda c: c, None),
    ("build_mla_metadata", "workspace_tokens", lambda n: 15, "workspace_tokens"),
    ("split_kv_b_proj", "kv_b_weight", short, "kv_b_weight"),
    ("split_kv_b_proj", "kv_b_weight", int64, "kv_b_weight"),
    ("split_kv_b_proj", "num_heads", lambda n: 4, "kv_b_weight"),
]  # fmt: skip
BAD = [case for case in BAD if case[3] is not None]


@pytest.mark.parametrize(
    "function, argument, change, named",
    BAD,
    ids=[f"{function}-{argument}-{i}" for i, (function, argument, *_) in enumerate(BAD)],
)
def test_refuses(ops, function, argument, change, named):
    given = arguments()[function]
    getattr(ops, function)(**{k: clone(v) for k, v in given.items()})  # the unchanged arguments are valid
    writable = [t for name in ("kv_cache", "kv_caches", "target") for t in flat(given.get(name))]
    bad = given | {argument: change(given[argument])}
    if argument not in ("kv_cache", "kv_caches", "target"):
        refuses(lambda: getattr(ops, function)(**bad), named, *writable)
    else:
        refuses(lambda: getattr(ops, function)(**bad), named)


def clone(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    return [t.clone() for t in value] if isinstance(value, list) else value


def flat(value):
    return value if isinstance(value, list) else [] if value is None else [value]


@pytest.mark.parametrize("threshold", [0, -1])
def test_refuses_a_threshold(ops, threshold):
    common = make_batch([1], [4]).common
    refuses(lambda: ops.split_decodes_and_prefills(common, threshold), "decode_threshold")
    refuses(lambda: ops.build_mla_metadata(common, 16, 64, threshold), "decode_threshold")


GOOD = dict(
    query_start_loc_cpu=integers(0, 1, 3),
    seq_lens_cpu=integers(4, 2),
    block_table=torch.zeros(2, 1, dtype=torch.int32),
    slot_mapping=torch.arange(3),
)


@pytest.mark.parametrize(
    "argument, change, named",
    [
        ("query_start_loc_cpu", int64, "query_start_loc_cpu"),
        ("query_start_loc_cpu", meta, "query_start_loc_cpu"),
        ("query_start_loc_cpu", lambda t: t[:0], "query_start_loc_cpu"),
        ("query_start_loc_cpu", lambda t: integers(0, 3, 1), "query_start_loc_cpu"),
        ("query_start_loc_cpu", lambda t: integers(1, 1, 3), "query_start_loc_cpu"),
        ("seq_lens_cpu", short, "seq_lens_cpu"),
        ("seq_lens_cpu", int64, "seq_lens_cpu"),
        ("seq_lens_cpu", put(1, 1), "seq_lens_cpu"),
        ("block_table", short, "block_table"),
        ("block_table", int64, "block_table"),
        ("slot_mapping", torch.Tensor.int, "slot_mapping"),
        ("slot_mapping", short, "slot_mapping"),
        ("slot_mapping", meta, "slot_mapping"),
    ],
)
def test_make_refuses(argument, change, named):
    CommonAttentionMetadata.make(**GOOD)
    refuses(lambda: CommonAttentionMetadata.make(**(GOOD | {argument: change(GOOD[argument])})), named)


# Tests of a step of a layer with a bad plan or a bad tensor.


def decode_field(name, change):
    return lambda step: replace(step, decode=replace(step.decode, **{name: change(getattr(step.decode, name))}))


def prefill_field(name, change):
    return lambda step: replace(step, prefill=replace(step.prefill, **{name: change(getattr(step.prefill, name))}))


def chunk_field(name, change):
    def bad(step):
        first, *others = step.prefill.context_chunks
        first = replace(first, **{name: change(getattr(first, name))})
        return replace(step, prefill=replace(step.prefill, context_chunks=(first, *others)))

    return bad


STEPS = {
    "slot past the cache": field("slot_mapping", put(0, 10_000)),
    "slot of the prefill past the cache": field("slot_mapping", put(5, 10_000)),
    "slot below -1": field("slot_mapping", put(0, -2)),
    "too few slots": field("slot_mapping", short),
    "slots in int32": field("slot_mapping", torch.Tensor.int),
    "more decodes than tokens": field("num_decode_tokens", lambda n: 100),
    "more tokens than rows": field("num_actual_tokens", lambda n: 100),
    "decode block past the cache": decode_field("block_table", put((0, 0), 10_000)),
    "decode block below 0": decode_field("block_table", put((0, 0), -1)),
    "decode table too narrow": decode_field("block_table", lambda t: t[:, :1]),
    "decode table in int64": decode_field("block_table", int64),
    "decode table of another batch": decode_field("block_table", short),
    "decode offsets fall": decode_field("query_start_loc", put(1, 2)),
    "decode offsets too few": decode_field("query_start_loc", short),
    "decode lengths too short": decode_field("seq_lens", put(0, -1)),
    "decode lengths too few": decode_field("seq_lens", short),
    "visible past the sequence": decode_field("visible_lens", put(0, 1000)),
    "visible too few": decode_field("visible_lens", short),
    "visible in int64": decode_field("visible_lens", int64),
    "prefill offsets fall": prefill_field("query_start_loc", put(1, 100)),
    "prefill offsets end elsewhere": prefill_field("query_start_loc", lambda t: t - (t == t.max()).int()),
    "prefill offsets too few": prefill_field("query_start_loc", short),
    "prefill offsets in int64": prefill_field("query_start_loc", int64),
    "prefill block past the cache": prefill_field("block_table", put((0, 0), 10_000)),
    "prefill table in int64": prefill_field("block_table", int64),
    "prefill table of another batch": prefill_field("block_table", short),
    "chunk starts below 0": chunk_field("starts", put(0, -16)),
    "chunk starts in int64": chunk_field("starts", int64),
    "chunk past the table": chunk_field("starts", put(0, 1600)),
    "chunk offsets fall": chunk_field("cu_seq_lens", put(1, 1000)),
    "chunk offsets too few": chunk_field("cu_seq_lens", short),
    "chunk of another length": chunk_field("num_tokens", lambda n: n + 1),
}


def step_inputs(ops):
    batch = make_batch([1, 1, 5, 7], [20, 33, 40, 7])
    plan = ops.build_mla_metadata(batch.common, 16, 64)
    assert plan.num_decodes == 2 and len(plan.prefill.context_chunks) > 0
    entries = make_entries(batch, DIRECT.head_size, torch.float32)
    cache = make_cache(batch, entries, DIRECT.head_size, torch.float32, new_tokens=False)
    layer = make_layer(ops, DIRECT, make_weights(DIRECT, torch.float32), torch.float32)
    return layer, torch.randn(14, DIRECT.hidden_size), torch.arange(14), cache, plan


@pytest.mark.parametrize("change", STEPS.values(), ids=STEPS)
def test_layer_refuses_a_plan(ops, change):
    """A layer refuses a plan with an invalid field, whatever the field is, and does not change the cache."""
    layer, hidden, positions, cache, plan = step_inputs(ops)
    layer(hidden, positions, cache.clone(), plan)
    before = cache.clone()
    with pytest.raises(ValueError) as error:
        layer(hidden, positions, cache, change(plan))
    assert_same_bits(cache, before)
    message = str(error.value)
    assert "\n" not in message and ": expected " in message and ", got " in message, message


@pytest.mark.parametrize(
    "which, change, named",
    [
        (0, rank, "hidden_states"),
        (0, narrow, "hidden_states"),
        (0, torch.Tensor.double, "hidden_states"),
        (0, half, "hidden_states"),
        (0, meta, "hidden_states"),
        (1, short, "positions"),
        (1, torch.Tensor.float, "positions"),
        (1, meta, "positions"),
        (2, rank, "kv_cache"),
        (2, narrow, "kv_cache"),
        (2, half, "kv_cache"),
        (2, meta, "kv_cache"),
    ],
)
def test_layer_refuses(ops, which, change, named):
    layer, hidden, positions, cache, plan = step_inputs(ops)
    given = [hidden, positions, cache]
    given[which] = change(given[which])
    refuses(lambda: layer(*given, plan), named, cache)


@pytest.mark.parametrize(
    "which, change, named",
    [(0, short, "kv_c_normed"), (0, narrow, "q"), (1, short, "kv_c_normed"), (1, half, "kv_c_normed"),
     (2, short, "k_pe"), (2, half, "k_pe"), (4, narrow, "output"), (4, half, "output")],
)  # fmt: skip
def test_layer_attention_refuses(ops, which, change, named):
    """`forward_attention` refuses bad input and changes neither cache nor output; integrations call it directly."""
    layer, hidden, positions, cache, plan = step_inputs(ops)
    q, kv_c, k_pe = layer.project(hidden, positions)
    output = torch.zeros(14, DIRECT.num_heads, DIRECT.v_head_dim)
    given = [q, kv_c, k_pe, cache, output]
    given[which] = change(given[which])
    refuses(lambda: layer.forward_attention(*given[:4], plan, given[4]), named, cache, output)


def test_decode_refuses_a_bound_below_its_queries(ops, plain_errors):
    """A decode refuses a `max_query_len` below the longest query, because its kernels would leave out query tokens."""
    cache = torch.randn(2, 4, 10)
    seen = integers(4, 2, 3, 4)
    plan = reference.DecodeMetadata(integers(0, 1)[:, None], integers(4, 4), offsets([1, 3]), 1, seen, 4, 4)
    wanted = "^metadata.max_query_len: expected an upper bound of the query lengths of 2 requests with 4 tokens, got 1$"
    with pytest.raises(ValueError, match=wanted):
        ops.mla_decode(torch.randn(4, 2, 8), torch.randn(4, 2, 2), cache, plan, 0.3)


def test_decode_refuses_half_a_schedule(ops, plain_errors):
    """A decode refuses an incomplete schedule.

    A schedule has both `tile_ranges` and `split_offsets`. A batch-invariant schedule can also lack both.
    """
    plan = DecodeMetadata(integers(0)[:, None], integers(4), offsets([1]), 1, integers(4), 4, 4)
    arguments = torch.randn(1, 2, 8), torch.randn(1, 2, 2), torch.randn(1, 4, 10), plan, 0.3
    for schedule, wanted in (
        (DecodeSchedule(), r"schedule.tile_ranges: expected \[programs, 5\] unless batch_invariant, got None"),
        (DecodeSchedule(None, offsets([1]), True), "schedule.split_offsets: expected None without tile_ranges, got a"),
        (
            DecodeSchedule(integers(0, 0, 0, 1, 0).view(1, 5), None, True),
            "schedule.split_offsets: expected a tensor, got NoneType",
        ),
    ):
        with pytest.raises((ValueError, TypeError), match=f"^{wanted}"):
            ops.mla_decode(*arguments, schedule)
    assert ops.mla_decode(*arguments, DecodeSchedule(batch_invariant=True)).out.isfinite().all()


def test_decode_takes_fewer_keys_than_queries(ops):
    """A decode accepts a request with fewer keys than query tokens; `visible_lens` has the keys that each token sees.

    On a rank that shares sequences with other ranks, a request can have fewer rank-local keys than query tokens.
    """
    cache = torch.randn(2, 4, 10)
    plan = DecodeMetadata(integers(0)[:, None], integers(1), offsets([2]), 2, integers(0, 1), 1, 4)
    state = ops.mla_decode(torch.randn(2, 3, 8), torch.randn(2, 3, 2), cache, plan, 0.3)
    assert (state.out[0] == 0).all() and (state.lse[:, 0] == -torch.inf).all()
    assert_same_bits(state.out[1], cache[0, 0, :8].expand(3, -1))


def test_out_dtype_decides_the_lse(ops):
    """The LSE of a float64 output is float64, and the LSE of any other output is float32.

    The dtype of the inputs does not matter. Each of these attention states can be merged with itself.
    """
    q, k, v, starts = torch.randn(4, 2, 6), torch.randn(4, 2, 6), torch.randn(4, 2, 5), offsets([4])
    for dtype in (torch.float32, torch.float64):
        for out_dtype in (torch.float32, torch.float64):
            state = ops.flash_attn_varlen(
                q.to(dtype), k.to(dtype), v.to(dtype), starts, starts, 4, 4, 0.4, True, out_dtype
            )
            assert (state.out.dtype, state.lse.dtype) == (out_dtype, out_dtype)
            ops.merge_attn_states(state, state)


def test_overlapping_views_are_no_two_caches(ops):
    """`swap_blocks` refuses two caches that are overlapping views of one tensor."""
    cache = torch.randn(6, 2, 3)
    refuses(lambda: ops.swap_blocks(cache[:4], cache[1:5], torch.tensor([[0, 1]])), "target", cache)


@pytest.mark.parametrize("device", ["meta"])
def test_default_device_moves_no_plan(ops, device):
    """If the inputs are on the CPU, plans and cosines are on the CPU too, whatever the default device is."""
    batch = make_batch([1, 3], [20, 33])
    torch.set_default_device(device)
    try:
        plan = ops.build_mla_metadata(batch.common, 16, 64)
        cos, _ = ops.rotary_cos_sin(torch.arange(4, device="cpu"), DIRECT.rope, 8, torch.float32)
    finally:
        torch.set_default_device(None)
    assert plan.prefill.context_chunks[0].starts.device.type == cos.device.type == "cpu"


def test_layer_leaves_no_graph(ops):
    """Neither the cache nor the output of a layer requires gradients, even if the layer's parameters require them."""
    layer, hidden, positions, cache, plan = step_inputs(ops)
    for parameter in layer.parameters():
        parameter.requires_grad_(True)
    output = layer(hidden, positions, cache, plan)
    assert not output.requires_grad and not cache.requires_grad


def test_empty_batches_are_legal(ops):
    """For a batch without tokens and requests, every function returns an empty result."""
    none = offsets([])
    q = torch.zeros(0, 3, 8)
    state = ops.flash_attn_varlen(q, q, q[..., :5], none, none, 0, 0, 0.3, True)
    assert state.out.shape == (0, 3, 5) and state.lse.shape == (3, 0)
    merged = ops.merge_attn_states(state, state)
    assert merged.out.shape == (0, 3, 5)
    cache = torch.full((2, 16, 32), torch.nan)
    ops.concat_and_cache_mla(torch.zeros(0, 24), torch.zeros(0, 8), cache, torch.empty(0, dtype=torch.int64))
    assert cache.isnan().all()
    table = torch.zeros(0, 3, dtype=torch.int32)
    assert ops.gather_and_maybe_dequant_cache(cache, table, none, integers(), 0).shape == (0, 32)
    assert ops.slot_mapping(none, integers(), table, 16, 0).shape == (0,)
    assert ops.plan_context_chunks(integers(), 16, 16) == ()
    plan = ops.build_mla_metadata(make_batch([], []).common, 16, 16)
    out = ops.mla_decode(torch.zeros(0, 3, 24), q, cache, plan.decode, 0.3)
    assert out.out.shape == (0, 3, 24) and out.lse.shape == (3, 0)
    weights = make_up_projections(DIRECT, torch.float32)
    out = ops.forward_prefill(
        torch.zeros(0, 3, 20), torch.zeros(0, 24), torch.zeros(0, 8), cache, plan.prefill, *weights, 0.3
    )
    assert out.out.shape == (0, 3, 10)
