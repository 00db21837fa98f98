"""Tier 5 of docs/correctness.md: plant a mistake of a real system in a package -> a check must fail.

A check is a function of another test module, such as `check_attention`; its argument `ops` is a package. A check must
pass on the package without the mistake. A mutant is a function that gets a package and pytest's `monkeypatch`, and
returns the package with a mistake.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fast.mla import new_tokens
from reference.interfaces import AttentionState, MLAConfig, YarnConfig

from ..attention.test_rope import ROPES, check_rope
from ..cache.test_cache import check_gather, check_write
from ..identities.test_identities import (
    SMALL,
    check_absorbed_is_expanded,
    check_attention,
    check_batch_composition,
    check_chunked_is_whole,
    check_layer,
    check_merge,
    check_merge_strides,
    check_several_queries,
)
from ..interfaces.test_interfaces import check_scale_law
from ..mla.test_builder import check_plan
from ..planning.test_batch import check_slots, check_split
from ..planning.test_schedule import check_chunks
from ..support.factories import DIRECT, LOW_RANK, make_batch
from ..twins.test_differential import (
    check_attention_parity,
    check_decode_parity,
    check_merge_parity,
    check_nan_query,
    check_unowned_bytes,
    check_visible_lens,
)


def altered(ops, **functions) -> SimpleNamespace:
    """Return a namespace with the public names of a package and its name; `functions` replace those so named."""
    return SimpleNamespace(__name__=ops.__name__, **({name: getattr(ops, name) for name in ops.__all__} | functions))


def with_lse(change):
    """Return a mutant whose `flash_attn_varlen` and `mla_decode` return `change(lse)` as LSE."""

    def mutant(ops, patch):
        def wrap(function):
            def wrong(*args, **kwargs):
                state = function(*args, **kwargs)
                return AttentionState(state.out, change(state.lse))

            return wrong

        return altered(ops, flash_attn_varlen=wrap(ops.flash_attn_varlen), mla_decode=wrap(ops.mla_decode))

    return mutant


base_2 = with_lse(lambda lse: lse / math.log(2))
swapped_axes = with_lse(lambda lse: lse.T.reshape(lse.shape))
empty_is_plus_inf = with_lse(lambda lse: lse.masked_fill(lse == -torch.inf, torch.inf))
empty_is_finite = with_lse(lambda lse: lse.masked_fill(lse == -torch.inf, -1e30))
lse_in_bf16 = with_lse(lambda lse: lse.bfloat16().to(lse.dtype))


def base_2_in_the_chunk_loop(ops, patch):
    """Plant LSEs in base 2 for context chunks, so that only prefills with context are wrong."""
    name = {"reference": "run_prefill_context_chunk", "fast": "_attend_context"}[ops.__name__]
    module = importlib.import_module(f"{ops.__name__}.mla.prefill")
    right = getattr(module, name)

    def wrong(*args, **kwargs):
        state = right(*args, **kwargs)
        return AttentionState(state.out, state.lse / math.log(2))

    patch.setattr(module, name, wrong)
    return ops


def latent_scale(ops, patch):
    def wrong(ql_nope, q_pe, kv_cache, metadata, softmax_scale, schedule=None):
        return ops.mla_decode(ql_nope, q_pe, kv_cache, metadata, kv_cache.shape[2] ** -0.5, schedule)

    return altered(ops, mla_decode=wrong)


def scale_off_by_two_percent(ops, patch):
    def wrong(ql_nope, q_pe, kv_cache, metadata, softmax_scale, schedule=None):
        return ops.mla_decode(ql_nope, q_pe, kv_cache, metadata, 1.02 * softmax_scale, schedule)

    return altered(ops, mla_decode=wrong)


def config_scale(change):
    """Return a mutant whose configs compute the softmax scale with `change`."""

    def mutant(ops, patch):
        patch.setattr(MLAConfig, "softmax_scale", property(change))
        return ops

    return mutant


def magnitude(config: MLAConfig) -> float:
    yarn = config.rope.yarn
    return 1.0 if yarn is None else (0.1 * yarn.mscale_all_dim * math.log(yarn.factor) + 1) ** 2


mscale_missing = config_scale(lambda c: c.qk_head_dim**-0.5)
mscale_twice = config_scale(lambda c: c.qk_head_dim**-0.5 * magnitude(c) ** 2)
scale_of_the_latent = config_scale(lambda c: c.head_size**-0.5 * magnitude(c))


def cos_sin_magnitude_missing(ops, patch):
    patch.setattr(YarnConfig, "cos_sin_scale", property(lambda yarn: 1.0))
    return ops


def mask_shifted(by):
    """Return a mutant whose decode rows attend `by` more keys of the sequence, or fewer keys if `by` is negative."""

    def mutant(ops, patch):
        def wrong(ql_nope, q_pe, kv_cache, metadata, softmax_scale, schedule=None):
            bounds = torch.repeat_interleave(metadata.seq_lens, metadata.query_start_loc.diff())
            visible = torch.minimum((metadata.visible_lens + by).clamp(min=0), bounds)
            return ops.mla_decode(ql_nope, q_pe, kv_cache, replace(metadata, visible_lens=visible), softmax_scale)

        return altered(ops, mla_decode=wrong)

    return mutant


def per_request(ops, change):
    """Return a package whose causal attention uses `change(q, k, v)` in place of q, k and v of each request.

    If `change` adds query rows, their outputs are dropped.
    """

    def wrong(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, out_dtype=None):
        outs, lses = [q.new_empty(0, q.shape[1], v.shape[2])], [q.new_empty(q.shape[1], 0)]
        for rows, keys, values in zip(
            q.split(cu_seqlens_q.diff().tolist()), k.split(cu_seqlens_k.diff().tolist()),
            v.split(cu_seqlens_k.diff().tolist()), strict=True,
        ):  # fmt: skip
            new_q, new_k, new_v = change(rows, keys, values) if causal else (rows, keys, values)
            ends = [torch.tensor([0, len(x)], dtype=torch.int32) for x in (new_q, new_k)]
            state = ops.flash_attn_varlen(
                new_q, new_k, new_v, *ends, len(new_q), len(new_k), softmax_scale, causal, out_dtype
            )
            outs.append(state.out[: len(rows)])
            lses.append(state.lse[:, : len(rows)])
        return AttentionState(torch.cat(outs), torch.cat(lses, 1))

    return altered(ops, flash_attn_varlen=wrong)


def causal_mask_excludes_self(ops, patch):
    return per_request(ops, lambda q, k, v: (torch.cat((q, q[-1:])), k, v))


def causal_mask_top_left(ops, patch):
    return per_request(ops, lambda q, k, v: (q, k[: len(q)], v[: len(q)]))


def plan_forgets_the_row_itself(ops, patch):
    def wrong(*args, **kwargs):
        plan = ops.build_mla_metadata(*args, **kwargs)
        visible = (plan.decode.visible_lens - 1).clamp(min=0)
        return replace(plan, decode=replace(plan.decode, visible_lens=visible))

    return altered(ops, build_mla_metadata=wrong)


def plan_from_the_sequence_end(ops, patch):
    """Let each query token attend the whole sequence of its request, also keys after the position of the token."""

    def wrong(*args, **kwargs):
        plan = ops.build_mla_metadata(*args, **kwargs)
        visible = torch.repeat_interleave(plan.decode.seq_lens, plan.decode.query_start_loc.diff())
        return replace(plan, decode=replace(plan.decode, visible_lens=visible))

    return altered(ops, build_mla_metadata=wrong)


def dropped_chunk(ops, patch):
    return altered(ops, plan_context_chunks=lambda *a, **k: ops.plan_context_chunks(*a, **k)[:-1])


def chunk_twice(ops, patch):
    def wrong(*args, **kwargs):
        chunks = ops.plan_context_chunks(*args, **kwargs)
        return chunks[:1] + chunks

    return altered(ops, plan_context_chunks=wrong)


def stale_table(block_table, lengths, block_size):
    """Return a block table in which the last block of each request is replaced by the block before it."""
    stale = block_table.clone()
    for request, length in enumerate(lengths):
        last = (length - 1) // block_size
        if last > 0:
            stale[request, last] = stale[request, last - 1]
    return stale


def stale_last_block_in_decode(ops, patch):
    def wrong(ql_nope, q_pe, kv_cache, metadata, softmax_scale, schedule=None):
        table = stale_table(metadata.block_table, metadata.seq_lens.tolist(), kv_cache.shape[1])
        return ops.mla_decode(ql_nope, q_pe, kv_cache, replace(metadata, block_table=table), softmax_scale)

    return altered(ops, mla_decode=wrong)


def dropped_last_block(ops, patch):
    """Let a decode read whole blocks only, as if the number of blocks were rounded down."""

    def wrong(ql_nope, q_pe, kv_cache, metadata, softmax_scale, schedule=None):
        block_size = kv_cache.shape[1]
        rows = metadata.query_start_loc.diff().long()
        whole = (metadata.seq_lens // block_size * block_size).repeat_interleave(rows)
        seen = torch.minimum(metadata.visible_lens, whole)
        return ops.mla_decode(ql_nope, q_pe, kv_cache, replace(metadata, visible_lens=seen), softmax_scale)

    return altered(ops, mla_decode=wrong)


def stale_last_block_in_gather(ops, patch):
    def wrong(kv_cache, block_table, cu_seq_lens, starts, num_tokens):
        table = stale_table(block_table, (starts + cu_seq_lens.diff()).tolist(), kv_cache.shape[1])
        return ops.gather_and_maybe_dequant_cache(kv_cache, table, cu_seq_lens, starts, num_tokens)

    return altered(ops, gather_and_maybe_dequant_cache=wrong)


def in_layer(name, wrap):
    """Return a mutant in which the layer calls `wrap(function)` instead of `function`, the public function `name`.

    In `fast`, some of the layer's calls are in other modules than the layer.
    """

    def mutant(ops, patch):
        modules = (getattr(ops.mla, module, None) for module in ("layer", "absorbed_path", "new_tokens"))
        (module,) = [module for module in modules if hasattr(module, name)]
        patch.setattr(module, name, wrap(getattr(ops, name)))
        return ops

    return mutant


def in_layer_write(wrap):
    """Return a mutant in which `wrap` changes the layer's cache write.

    The cache write is a separate op in `reference`, and a part of a fused op in `fast`.
    """

    def fused(function):
        def wrong(positions, q_pe, kv_c, k_pe, kv_cache, slot_mapping, *args, **kwargs):
            def write(kv_c, k_pe, kv_cache, slot_mapping):
                return function(positions, q_pe, kv_c, k_pe, kv_cache, slot_mapping, *args, **kwargs)

            return wrap(write)(kv_c, k_pe, kv_cache, slot_mapping)

        return wrong

    def mutant(ops, patch):
        if ops.__name__ == "fast":
            patch.setattr(new_tokens, "rope_norm_and_cache", fused(new_tokens.rope_norm_and_cache))
            return ops
        return in_layer("concat_and_cache_mla", wrap)(ops, patch)

    return mutant


def in_layer_rope(wrap):
    """Return a mutant in which `wrap` changes the layer's rope.

    Rope is a separate op in `reference`, and a part of a fused op in `fast`.
    """

    def fused(function):
        def wrong(positions, q_pe, kv_c, k_pe, kv_cache, slot_mapping, norm_weight, eps, rope, *args, **kwargs):
            def rotate(positions, q_pe, k_pe, rope, **kwargs):
                cached = kv_cache, slot_mapping, norm_weight, eps
                return function(positions, q_pe, kv_c, k_pe, *cached, rope, *args, **kwargs)

            return wrap(rotate)(positions, q_pe, k_pe, rope, **kwargs)

        return wrong

    def mutant(ops, patch):
        if ops.__name__ == "fast":
            patch.setattr(new_tokens, "rope_norm_and_cache", fused(new_tokens.rope_norm_and_cache))
            return ops
        return in_layer("apply_rope", wrap)(ops, patch)

    return mutant


def other_pairs(function):
    def wrong(positions, q_pe, k_pe, rope, **kwargs):
        return function(positions, q_pe, k_pe, replace(rope, interleaved=not rope.interleaved), **kwargs)

    return wrong


def last_token_unwritten(function):
    def wrong(kv_c_normed, k_pe, kv_cache, slot_mapping, *args, **kwargs):
        kept = slot_mapping.clone()
        kept[(kept[: len(kv_c_normed)] >= 0).nonzero()[-1:]] = -1
        return function(kv_c_normed, k_pe, kv_cache, kept, *args, **kwargs)

    return wrong


def padding_written(function):
    def wrong(kv_c_normed, k_pe, kv_cache, slot_mapping, *args, **kwargs):
        return function(kv_c_normed, k_pe, kv_cache, slot_mapping.clamp(min=0), *args, **kwargs)

    return wrong


def rope_before_latent(function):
    def wrong(kv_c_normed, k_pe, kv_cache, slot_mapping, *args, **kwargs):
        return function(k_pe, kv_c_normed, kv_cache, slot_mapping, *args, **kwargs)

    return wrong


def zero_times_everything(function):
    """Add 0 x the sum of the cache to the output, so that a NaN in an unused cache entry reaches every output."""

    def wrong(ql_nope, q_pe, kv_cache, *args, **kwargs):
        state = function(ql_nope, q_pe, kv_cache, *args, **kwargs)
        return AttentionState(state.out + 0 * kv_cache.sum(), state.lse)

    return wrong


def rows_share_an_amax(function):
    """Divide the outputs by the largest element of the batch, and multiply the quotients by this element again.

    An fp8 computation with one scale for the whole batch does the same. A NaN in the output of one request then reaches
    all requests.
    """

    def wrong(*args, **kwargs):
        state = function(*args, **kwargs)
        return AttentionState(state.out / state.out.abs().max() * state.out.abs().max(), state.lse)

    return wrong


def public(name, wrap):
    return lambda ops, patch: altered(ops, **{name: wrap(getattr(ops, name))})


def merge_with_the_other_sides_strides(ops, patch):
    def wrong(prefix, suffix):
        flat = torch.cat((suffix.out.contiguous().flatten(), suffix.out.new_zeros(prefix.out.untyped_storage().size())))
        misread = flat.as_strided(suffix.out.shape, prefix.out.stride())
        return ops.merge_attn_states(prefix, AttentionState(misread, suffix.lse))

    return altered(ops, merge_attn_states=wrong)


def merge_by_the_mean(ops, patch):
    def wrong(prefix, suffix):
        right = ops.merge_attn_states(prefix, suffix)
        return AttentionState((prefix.out + suffix.out) / 2, right.lse)

    return altered(ops, merge_attn_states=wrong)


def naive_merge(ops, patch):
    """Merge without special cases, so that the merge of two rows without keys computes 0 / 0."""

    def wrong(prefix, suffix):
        a, b = prefix.lse.exp().T[..., None], suffix.lse.exp().T[..., None]
        out = (a * prefix.out + b * suffix.out) / (a + b)
        return AttentionState(out.to(prefix.out.dtype), torch.logaddexp(prefix.lse, suffix.lse))

    return altered(ops, merge_attn_states=wrong)


def threshold_exclusive(ops, patch):
    def wrong(common, decode_threshold=1, require_uniform=False):
        if decode_threshold == 1:
            return ops.split_decodes_and_prefills(common, 1, require_uniform)
        return ops.split_decodes_and_prefills(common, decode_threshold - 1, require_uniform)

    return altered(ops, split_decodes_and_prefills=wrong)


def slots_from_the_start(ops, patch):
    """Give new tokens the slots of positions from 0 on, instead of the positions after the context."""

    def wrong(query_start_loc, seq_lens, block_table, block_size, num_tokens):
        return ops.slot_mapping(query_start_loc, query_start_loc.diff(), block_table, block_size, num_tokens)

    return altered(ops, slot_mapping=wrong)


def layer(ops):
    check_layer(ops, LOW_RANK, [(17, 1), (1, 5), (1, 1)])


def attention(ops):
    check_attention(ops, [2, 0, 3, 2], [3, 3, 0, 5], 2, True)


def decode(ops):
    check_decode_parity(ops, LOW_RANK, [1, 2, 1], [17, 40, 0], torch.bfloat16)


def chunked(ops):
    check_chunked_is_whole(ops, SMALL, [2, 3], [13, 29], 16, 4)


def chunked_in_float32(ops):
    check_chunked_is_whole(ops, SMALL, [2, 3], [13, 29], 16, 4, torch.float32)


def absorbed(ops):
    check_absorbed_is_expanded(ops, DIRECT, [1, 2], [17, 31])


def plan(ops):
    check_plan(ops, [1, 3, 2, 5], [17, 20, 2, 36], 16, 64, 3)


CONTROLS = [
    ("wrong scale", latent_scale, absorbed),
    ("wrong scale", latent_scale, decode),
    ("wrong scale by 2%", scale_off_by_two_percent, decode),
    ("wrong scale in the config", scale_of_the_latent, lambda ops: check_scale_law(LOW_RANK)),
    ("wrong scale in the config", scale_of_the_latent, layer),
    ("base-2 LSE", base_2, attention),
    ("base-2 LSE", base_2, check_merge),
    ("base-2 LSE", base_2, decode),
    ("base-2 LSE", base_2, lambda ops: check_attention_parity(ops, [3, 17], [9, 17], 3, torch.bfloat16, True)),
    ("base-2 LSE of cached chunks", base_2_in_the_chunk_loop, chunked),
    ("base-2 LSE of cached chunks", base_2_in_the_chunk_loop, chunked_in_float32),
    ("LSE in bf16", lse_in_bf16, lambda ops: check_attention_parity(ops, [3, 17], [9, 17], 3, torch.bfloat16, True)),
    ("empty rows +inf", empty_is_plus_inf, attention),
    ("empty rows finite", empty_is_finite, attention),
    ("empty rows +inf", empty_is_plus_inf, decode),
    ("swapped LSE axes", swapped_axes, attention),
    ("swapped LSE axes", swapped_axes, check_merge),
    ("swapped LSE axes", swapped_axes, decode),
    ("off-by-one mask", mask_shifted(-1), decode),
    ("off-by-one mask", mask_shifted(1), decode),
    ("off-by-one mask", mask_shifted(1), check_several_queries),
    ("off-by-one mask", mask_shifted(-1), check_visible_lens),
    ("off-by-one mask, causal", causal_mask_excludes_self, attention),
    ("top-left mask", causal_mask_top_left, attention),
    ("off-by-one plan", plan_forgets_the_row_itself, plan),
    ("reads past its position", plan_from_the_sequence_end, plan),
    ("reads past its position", plan_from_the_sequence_end, check_several_queries),
    ("dropped chunk", dropped_chunk, chunked),
    ("dropped chunk", dropped_chunk, lambda ops: check_chunks(ops, [40, 0, 7], 32, 16)),
    ("dropped chunk", dropped_chunk, chunked_in_float32),
    ("chunk twice", chunk_twice, chunked),
    ("chunk twice", chunk_twice, chunked_in_float32),
    ("chunk twice", chunk_twice, lambda ops: check_chunks(ops, [40, 0, 7], 32, 16)),
    ("stale last block", stale_last_block_in_decode, decode),
    ("dropped last block", dropped_last_block, decode),
    ("stale last block", stale_last_block_in_gather,
     lambda ops: check_gather(ops, (33, 5), (0, 0), (33, 5), torch.float32)),
    ("last token unwritten", in_layer_write(last_token_unwritten), layer),
    ("last token unwritten", public("concat_and_cache_mla", last_token_unwritten),
     lambda ops: check_write(ops, (1, 3), (1, 16), torch.float32)),
    ("padding written", public("concat_and_cache_mla", padding_written),
     lambda ops: check_write(ops, (1, 3), (1, 0), torch.float32)),
    ("rope before latent", public("concat_and_cache_mla", rope_before_latent),
     lambda ops: check_write(ops, (1, 3), (1, 16), torch.float32)),
    ("other rope pairs", public("apply_rope", other_pairs), lambda ops: check_rope(ops, ROPES["default"])),
    ("other rope pairs", in_layer_rope(other_pairs), layer),
    ("mscale^2 missing", mscale_missing, lambda ops: check_scale_law(LOW_RANK)),
    ("mscale^2 missing", mscale_missing, layer),
    ("mscale^2 twice", mscale_twice, lambda ops: check_scale_law(LOW_RANK)),
    ("mscale^2 twice", mscale_twice, layer),
    ("cos and sin without magnitude", cos_sin_magnitude_missing, lambda ops: check_rope(ops, ROPES["one mscale"])),
    ("cos and sin without magnitude", cos_sin_magnitude_missing, layer),
    ("0 x NaN", in_layer("mla_decode", zero_times_everything), check_unowned_bytes),
    ("batch-wide amax", public("mla_decode", rows_share_an_amax), check_nan_query),
    ("merge assumes strides", merge_with_the_other_sides_strides, check_merge_strides),
    ("merge by the mean", merge_by_the_mean, check_merge),
    ("merge of empty rows", naive_merge, lambda ops: check_merge_parity(ops, torch.float32)),
    ("threshold exclusive", threshold_exclusive, lambda ops: check_split(ops, [1, 3, 2, 5], 3, False)),
    ("slots from the start", slots_from_the_start, lambda ops: check_slots(ops, [1, 3], [20, 33], 16)),
    ("stale last block", stale_last_block_in_decode, check_batch_composition),
]  # fmt: skip


def named(control):
    name, _mutant, check = control
    return f"{name}-{check.__name__}".replace(" ", "_")


@pytest.mark.parametrize("name, mutant, check", CONTROLS, ids=map(named, CONTROLS))
def test_planted_mistake_is_found(ops, monkeypatch, name, mutant, check):
    """Run a check -> it passes on the unchanged package and fails on the package with the planted mistake."""
    check(ops)
    with pytest.raises(AssertionError):
        check(mutant(ops, monkeypatch))


def test_batches_are_long_enough_for_stale_blocks():
    """Look at the batch of the check `decode` -> a request has several blocks, as the "stale" mutants require."""
    assert max(len(own) for own in make_batch([1, 2, 1], [17, 40, 0]).slots) > 16
