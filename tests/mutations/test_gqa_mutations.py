"""Plant a mistake of a real system in grouped-query attention (GQA) -> a check of another test module must fail.

A check is a function of another test module, such as `check_masked_softmax`; its argument `ops` is a package. A check
must pass on the package without the mistake. A mutant is a function that gets a package and pytest's `monkeypatch`, and
returns the package with a mistake.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from reference.interfaces import FP8_E4M3, AttentionState
from reference.interfaces.gqa import AttentionType, GQAConfig, PagedAttentionMetadata

from ..gqa.test_reference_attention import (
    check_nan_stays_in_its_request,
    check_stored_formats,
    check_write,
)
from ..gqa.test_reference_layer import (
    check_cross,
    check_kv_sharing,
    check_output_scale,
    check_ranks_are_one_rank,
    check_step,
    check_step_without_cache,
)
from ..identities.test_gqa_identities import (
    CASCADED,
    CROSS,
    ENCODER,
    LOCAL,
    check_alibi_position,
    check_cascade_is_whole,
    check_chunked_is_whole,
    check_cross_attention,
    check_encoder,
    check_layouts,
    check_local_attention,
    check_lse_contains_the_sink,
    check_masked_softmax,
    check_paged_is_contiguous,
    check_prefill_is_decode,
)
from ..support.gqa import CONFIGS, GROUPED, MHA, MQA, SLOPES
from .test_mutations import altered

LENS = ((1, 20), (1, 0), (3, 17), (17, 40))
SINKS = replace(MQA, attention_sinks=True)
WINDOW = replace(GROUPED, sliding_window=7)
CAP = replace(GROUPED, logits_soft_cap=0.8)
ALIBI = replace(GROUPED, alibi_slopes=SLOPES)


def with_fields(config: GQAConfig, **fields) -> GQAConfig:
    """Return a copy of a config with other fields, which are not checked."""
    config = copy.copy(config)
    for name, value in fields.items():
        object.__setattr__(config, name, value)
    return config


def both(change):
    """Return a mutant whose attention functions get changed arguments.

    `change(config, sinks)` returns the config and the sinks that the functions get.
    """

    def mutant(ops, patch):
        def paged(q, kv_cache, metadata, config, sinks=None, *args, **kwargs):
            return ops.gqa_paged_attention(q, kv_cache, metadata, *change(config, sinks), *args, **kwargs)

        def varlen(q, k, v, first, second, longest_q, longest_k, config, sinks=None, *args, **kwargs):
            given = q, k, v, first, second, longest_q, longest_k
            return ops.gqa_varlen_attention(*given, *change(config, sinks), *args, **kwargs)

        return altered(ops, gqa_paged_attention=paged, gqa_varlen_attention=varlen)

    return mutant


def new_config(change):
    return both(lambda config, sinks: (change(config), sinks))


def new_sinks(change):
    return both(lambda config, sinks: (config, None if sinks is None else change(config, sinks)))


def new_plan(change):
    """Return a mutant whose attention over a cache gets the plan `change(metadata)`."""

    def mutant(ops, patch):
        def wrong(q, kv_cache, metadata, *args, **kwargs):
            return ops.gqa_paged_attention(q, kv_cache, change(metadata), *args, **kwargs)

        return altered(ops, gqa_paged_attention=wrong)

    return mutant


def new_state(change):
    """Return a mutant whose attention over a cache returns `change(state, sinks)`."""

    def mutant(ops, patch):
        def wrong(q, kv_cache, metadata, config, sinks=None, *args, **kwargs):
            state = ops.gqa_paged_attention(q, kv_cache, metadata, config, sinks, *args, **kwargs)
            return change(state, sinks)

        return altered(ops, gqa_paged_attention=wrong)

    return mutant


def scale_times(factor):
    return new_config(lambda config: replace(config, scale=config.softmax_scale * factor))


def window_shifted(by):
    """Let the window begin `by` keys later, or earlier if `by` is negative."""

    def change(plan):
        if plan.first_visible is None:
            return plan
        ends = torch.repeat_interleave(plan.seq_lens, plan.query_start_loc.diff())
        ends = torch.nn.functional.pad(ends, (0, plan.visible_lens.shape[0] - ends.shape[0]))
        moved = torch.where(plan.first_visible > 0, plan.first_visible + by, plan.first_visible)
        return replace(plan, first_visible=torch.minimum(moved, torch.minimum(plan.visible_lens, ends)))

    return new_plan(change)


def mask_shifted(by):
    """Let each query token attend `by` more keys of its request, or fewer keys if `by` is negative."""

    def change(plan):
        ends = torch.repeat_interleave(plan.seq_lens, plan.query_start_loc.diff())
        ends = torch.nn.functional.pad(ends, (0, plan.visible_lens.shape[0] - ends.shape[0]))
        return replace(plan, visible_lens=torch.minimum((plan.visible_lens + by).clamp(min=0), ends))

    return new_plan(change)


def window_ignored(plan):
    return replace(plan, first_visible=torch.zeros_like(plan.visible_lens))


# The cap is applied to q.k instead of to scale * q.k: scale * c * tanh(q.k / c) is a soft cap of scale * c.
cap_before_scale = new_config(
    lambda config: (
        config
        if config.logits_soft_cap is None
        else replace(config, logits_soft_cap=config.softmax_scale * config.logits_soft_cap)
    )
)
cap_missing = new_config(lambda config: replace(config, logits_soft_cap=None))


def new_slopes(change):
    return new_config(
        lambda config: (
            config
            if config.alibi_slopes is None
            else with_fields(config, alibi_slopes=tuple(change(list(config.alibi_slopes))))
        )
    )


alibi_sign = new_slopes(lambda slopes: [-slope for slope in slopes])
alibi_scaled = new_slopes(lambda slopes: [slope * 80**-0.5 for slope in slopes])
alibi_of_other_heads = new_slopes(lambda slopes: slopes[::-1])


def heads_interleaved(ops, patch):
    """Let query head h attend with KV head h % Nkv instead of h // (N / Nkv)."""

    def order_of(config):
        kv_heads = config.num_kv_heads
        return [h for kv in range(kv_heads) for h in range(config.num_heads) if h % kv_heads == kv]

    def paged(q, kv_cache, metadata, config, sinks=None, *args, **kwargs):
        order = order_of(config)
        state = ops.gqa_paged_attention(q[:, order], kv_cache, metadata, config, sinks, *args, **kwargs)
        out, lse = torch.empty_like(state.out), torch.empty_like(state.lse)
        out[:, order], lse[order] = state.out, state.lse
        return AttentionState(out, lse)

    return altered(ops, gqa_paged_attention=paged)


def keys_and_values_swapped(ops, patch):
    def wrong(q, kv_cache, *args, **kwargs):
        return ops.gqa_paged_attention(q, kv_cache.flip(0), *args, **kwargs)

    return altered(ops, gqa_paged_attention=wrong)


def layout_misread(ops, patch):
    """Read the memory of every cache as if its layout were NHD."""

    def wrong(q, kv_cache, *args, **kwargs):
        misread = kv_cache.as_strided(kv_cache.shape, torch.empty(kv_cache.shape, device="meta").stride())
        return ops.gqa_paged_attention(q, misread, *args, **kwargs)

    return altered(ops, gqa_paged_attention=wrong)


def stale_last_block(plan):
    """Replace the last block of each request by the block before it."""
    table = plan.block_table.clone()
    for request, length in enumerate(plan.seq_lens.tolist()):
        last = (length - 1) // plan.block_size
        if last > 0 and 0 <= table[request, last - 1] < 1000:
            table[request, last] = table[request, last - 1]
    return replace(plan, block_table=table)


def lse_without_sink(state, sinks):
    """Leave the sink out of the LSE, although the output counts it."""
    if sinks is None:
        return state
    rest = state.lse + torch.log1p(-torch.exp(sinks[:, None].to(state.lse.dtype) - state.lse).clamp(max=1))
    return AttentionState(state.out, rest)


def sink_as_a_value(state, sinks):
    """Divide the output by the sum without the sink, although the LSE counts the sink."""
    if sinks is None:
        return state
    kept = -torch.expm1(sinks[:, None].to(state.lse.dtype) - state.lse)
    return AttentionState(state.out / kept.clamp(min=1e-300).T[..., None].to(state.out.dtype), state.lse)


def cascade_with(sinks_of_prefix: bool, sinks_of_suffix: bool):
    """Return a mutant whose cascade gives the sinks to the wrong parts, or merges only some of them."""

    def mutant(ops, patch):
        def wrong(q, kv_cache, cascade, config, sinks=None, *args, **kwargs):
            states = []
            for plan, counted in ((cascade.prefix, sinks_of_prefix), (cascade.suffix, sinks_of_suffix)):
                part = config if counted else replace(config, attention_sinks=False)
                plan = PagedAttentionMetadata(**vars(plan))
                states.append(ops.gqa_paged_attention(q, kv_cache, plan, part, sinks if counted else None))
            return ops.merge_attn_states(*states)

        return altered(ops, gqa_cascade_attention=wrong)

    return mutant


def sink_counted_twice(ops, patch):
    """Count the sinks also in a state that gets none: the first sinks that were passed count in every later call."""
    seen = []

    def wrong(q, kv_cache, metadata, config, sinks=None, *args, **kwargs):
        if sinks is not None:
            seen[:] = [sinks]
        elif seen and seen[0].shape[0] == config.num_heads:
            config, sinks = replace(config, attention_sinks=True), seen[0]
        return ops.gqa_paged_attention(q, kv_cache, metadata, config, sinks, *args, **kwargs)

    return altered(ops, gqa_paged_attention=wrong)


def type_of(wrong_type):
    """Return a mutant in which attention without a cache has the mask of another attention type."""

    def mutant(ops, patch):
        def wrong(q, k, v, first, second, longest_q, longest_k, config, sinks=None, *args, **kwargs):
            config = with_fields(config, attention_type=wrong_type)
            given = q, k, v, first, second, longest_q, longest_k
            return ops.gqa_varlen_attention(*given, config, sinks, *args, **kwargs)

        return altered(ops, gqa_varlen_attention=wrong)

    return mutant


def local_attention_is_global(ops, patch):
    def wrong(common, attention_chunk_size, block_size):
        whole = -(-max(common.seq_lens_cpu.tolist()) // block_size) * block_size
        return ops.make_local_attention_virtual_batches(common, max(whole, attention_chunk_size), block_size)

    return altered(ops, make_local_attention_virtual_batches=wrong)


def causal_cross_attention(plan):
    """Give the queries of cross attention a causal mask."""
    ends = []
    for query_len, length in zip(plan.query_start_loc.diff().tolist(), plan.seq_lens.tolist(), strict=True):
        ends += [max(0, length - query_len + i + 1) for i in range(query_len)]
    return replace(plan, visible_lens=torch.tensor(ends, dtype=torch.int32))


def new_write(change):
    """Return a mutant whose cache write gets the arguments `change(key, value, slots, scales)`."""

    def mutant(ops, patch):
        return altered(ops, reshape_and_cache=changed_write(ops.reshape_and_cache, change))

    return mutant


def changed_write(function, change):
    def wrong(key, value, kv_cache, slot_mapping, cache_format, k_scale=None, v_scale=None, **options):
        key, value, slots, scales = change(key, value, slot_mapping, (k_scale, v_scale))
        function(key, value, kv_cache, slots, cache_format, *scales, **options)

    return wrong


def in_layer(name, wrap):
    """Return a mutant in which the layer calls `wrap(function)` instead of the function `name`."""

    def mutant(ops, patch):
        patch.setattr(ops.gqa.layer, name, wrap(getattr(ops.gqa.layer, name)))
        return ops

    return mutant


def in_layer_write(change):
    return in_layer("reshape_and_cache", lambda function: changed_write(function, change))


def write_swapped(key, value, slots, scales):
    return value, key, slots, scales


def write_with_swapped_scales(key, value, slots, scales):
    return key, value, slots, scales[::-1]


def write_padding(key, value, slots, scales):
    return key.nan_to_num(), value.nan_to_num(), slots.clamp(min=0), scales


def last_token_unwritten(key, value, slots, scales):
    slots = slots.clone()
    slots[(slots[: len(key)] >= 0).nonzero()[-1:]] = -1
    return key, value, slots, scales


def read_with_swapped_scales(ops, patch):
    def wrong(*args, k_scale=None, v_scale=None, **kwargs):
        return ops.gqa_paged_attention(*args, k_scale=v_scale, v_scale=k_scale, **kwargs)

    return altered(ops, gqa_paged_attention=wrong)


def query_scale_ignored(ops, patch):
    def wrong(*args, q_scale=None, **kwargs):
        return ops.gqa_paged_attention(*args, **kwargs)

    return altered(ops, gqa_paged_attention=wrong)


def zero_times_everything(ops, patch):
    """Add 0 x the sum of the cache to the output, so that a NaN of another request reaches every output."""

    def wrong(q, kv_cache, *args, **kwargs):
        state = ops.gqa_paged_attention(q, kv_cache, *args, **kwargs)
        return AttentionState(state.out + 0 * kv_cache.sum(), state.lse)

    return altered(ops, gqa_paged_attention=wrong)


def sharing_layer_writes(ops, patch):
    """Let every layer store zeros in the cache after a step, as a sharing layer that also writes would."""

    class Wrong(ops.GQAAttention):
        def forward(self, q, k, v, kv_cache, *args, **kwargs):
            out = super().forward(q, k, v, kv_cache, *args, **kwargs)
            if k is None:
                kv_cache[:, 0, 0] = 0
            return out

    return altered(ops, GQAAttention=Wrong)


def rounded_before_the_output_scale(function):
    """Return the attention of a layer with an output that was rounded to bfloat16."""

    def wrong(*args, out=None, **kwargs):
        state = function(*args, **kwargs)
        rounded = state.out.bfloat16().to(state.out.dtype)
        if out is not None:
            out.copy_(rounded)
        return AttentionState(rounded, state.lse)

    return wrong


def sinks_of_every_rank(ops, patch):
    """Let every rank count the sinks, so that the merge counts them several times."""
    module = ops.gqa.context_parallel
    right, kept = module.gathered_config, {}

    def config_with_sinks(config, size, has_sinks=True):
        return right(config, size, True)

    def attend(function):
        def wrong(q, kv_cache, metadata, config, sinks=None, *args, **kwargs):
            if sinks is not None:
                kept["sinks"] = sinks
            return function(q, kv_cache, metadata, config, kept["sinks"], *args, **kwargs)

        return wrong

    patch.setattr(module, "gathered_config", config_with_sinks)
    patch.setattr(module, "gqa_paged_attention", attend(module.gqa_paged_attention))
    return ops


def softmax(config, freed=True):
    """Return a check of a config against the masked softmax; without `freed`, no block was freed behind a window."""

    def check(ops):
        check_masked_softmax(ops, config, LENS, freed)

    check.__name__ = f"masked_softmax_{next((name for name, each in CONFIGS.items() if each == config), 'special')}"
    return check


def call(function, *args, **kwargs):
    """Return `function` with further arguments as a check."""

    def check(ops):
        function(ops, *args, **kwargs)

    check.__name__ = function.__name__
    return check


ALL = CONFIGS["all of them"]
CONTROLS = [
    ("wrong scale by 2%", scale_times(1.02), softmax(GROUPED)),
    ("wrong scale of Dh", scale_times(80**-0.5), softmax(GROUPED)),
    ("window without the token itself", window_shifted(1), softmax(WINDOW)),
    ("window of one more key", window_shifted(-1), softmax(WINDOW, freed=False)),
    ("window off by one", window_shifted(1), call(check_paged_is_contiguous, WINDOW)),
    ("window of one key", window_shifted(1), softmax(CONFIGS["window 1"])),
    ("window ignored", new_plan(window_ignored), softmax(WINDOW, freed=False)),
    ("off-by-one mask", mask_shifted(-1), softmax(MHA)),
    ("off-by-one mask", mask_shifted(1), softmax(MHA)),
    ("off-by-one mask", mask_shifted(1), call(check_prefill_is_decode, GROUPED)),
    ("cap before scale", cap_before_scale, softmax(CAP)),
    ("cap missing", cap_missing, softmax(CAP)),
    ("ALiBi sign", alibi_sign, softmax(ALIBI)),
    ("ALiBi times the scale", alibi_scaled, softmax(ALIBI)),
    ("ALiBi of other heads", alibi_of_other_heads, softmax(ALIBI)),
    ("ALiBi sign", alibi_sign, check_alibi_position),
    ("ALiBi sign", alibi_sign, call(check_encoder, replace(ENCODER, alibi_slopes=SLOPES))),
    ("wrong KV head mapping", heads_interleaved, softmax(GROUPED)),
    ("wrong KV head mapping", heads_interleaved, call(check_paged_is_contiguous, GROUPED)),
    ("keys and values swapped", keys_and_values_swapped, softmax(GROUPED)),
    ("keys and values swapped", keys_and_values_swapped, call(check_cross_attention)),
    ("layout misread", layout_misread, call(check_layouts)),
    ("layout misread", layout_misread, call(check_cross_attention, layout="HND")),
    ("stale last block", new_plan(stale_last_block), softmax(GROUPED)),
    ("sink times the scale", new_sinks(lambda config, sinks: sinks * config.softmax_scale), softmax(SINKS)),
    ("sink with the cap", new_sinks(lambda config, sinks: sinks.tanh()), softmax(SINKS)),
    ("sinks of other heads", new_sinks(lambda config, sinks: sinks.flip(0)), softmax(SINKS)),
    ("sinks missing", both(lambda config, sinks: (replace(config, attention_sinks=False), None)), softmax(SINKS)),
    ("LSE without the sink", new_state(lse_without_sink), softmax(SINKS)),
    ("LSE without the sink", new_state(lse_without_sink), check_lse_contains_the_sink),
    ("LSE without the sink", new_state(lse_without_sink), call(check_chunked_is_whole, SINKS, 16)),
    ("sink that the output ignores", new_state(sink_as_a_value), softmax(SINKS)),
    ("sink counted twice", sink_counted_twice, call(check_chunked_is_whole, SINKS, 16)),
    ("sink counted twice", cascade_with(True, True), call(check_cascade_is_whole, CASCADED["sinks and soft cap"])),
    ("sink of no part", cascade_with(False, False), call(check_cascade_is_whole, CASCADED["sinks and soft cap"])),
    ("sink of every rank", sinks_of_every_rank, call(check_ranks_are_one_rank, 2, 2)),
    ("encoder with a causal mask", type_of(AttentionType.DECODER), call(check_encoder, ENCODER)),
    ("cross attention with a causal mask", type_of(AttentionType.DECODER), call(check_cross_attention)),
    ("cross attention with a causal mask", new_plan(causal_cross_attention), call(check_cross_attention)),
    ("local attention is global", local_attention_is_global, call(check_local_attention, LOCAL, freed=False)),
    ("local attention is global", new_config(lambda config: replace(config, attention_chunk_size=None)),
     call(check_local_attention, LOCAL)),
    ("keys and values swapped in the write", new_write(write_swapped), call(check_write)),
    ("scales swapped in the write", new_write(write_with_swapped_scales), call(check_write, cache_format=FP8_E4M3)),
    ("padding written", new_write(write_padding), call(check_write)),
    ("last token unwritten", new_write(last_token_unwritten), call(check_write)),
    ("scales swapped in the read", read_with_swapped_scales, call(check_stored_formats, GROUPED)),
    ("scale of queries ignored", query_scale_ignored, call(check_stored_formats, GROUPED, query_scale=0.013)),
    ("0 x NaN", zero_times_everything, softmax(GROUPED)),
    ("0 x NaN", zero_times_everything, check_nan_stays_in_its_request),
    ("last token unwritten", in_layer_write(last_token_unwritten), call(check_step, ALL)),
    ("keys and values swapped in the write", in_layer_write(write_swapped), call(check_step, GROUPED)),
    ("keys and values swapped in the write", in_layer_write(write_swapped), check_cross),
    ("no rounding without a cache", in_layer("_rounded", lambda function: lambda x, scale: x),
     call(check_step_without_cache, GROUPED, FP8_E4M3)),
    ("sharing layer writes", sharing_layer_writes, check_kv_sharing),
    ("rounded twice", in_layer("gqa_paged_attention", rounded_before_the_output_scale),
     call(check_output_scale, torch.bfloat16)),
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


def test_changes_of_configs_are_changes():
    """Change configs as the mutants do -> the new config differs, and the old one stays as it was."""
    changed = with_fields(ALIBI, alibi_slopes=(-0.5,) * 6)
    assert changed != ALIBI and ALIBI.alibi_slopes == SLOPES
    assert with_fields(CROSS, attention_type=AttentionType.DECODER).softmax_scale == CROSS.softmax_scale
