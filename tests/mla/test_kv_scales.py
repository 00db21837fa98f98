"""Tests of the scale of a layer's cache: its sources in their order, and when it is fixed.

A layer takes the scale from the first of these sources: an argument, the checkpoint, a calibration file, the first
prefill, 1.0 with a warning.
"""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import fast
import reference
from reference.interfaces import (
    COMPUTE_FORMAT,
    E4M3_MAX,
    FP8_DS_MLA,
    FP8_E4M3,
    KVScale,
    MLAConfig,
    RopeConfig,
    ScaleSource,
    UnsupportedConfiguration,
    checkpoint_scale,
    largest_entry,
)

from ..support.context_parallel import of_rank
from ..support.factories import LOW_RANK, assert_same_bits, make_batch, make_layer, make_weights
from ..support.format_caches import SMALL, WIDE, poisoned_cache, step_of
from ..support.hf_modules import hf_module
from ..support.ranks import make_rank_layer

LENS = (20, 7)


class Case:
    """A layer over a cache, by default in `fp8_e4m3`, with two requests and their hidden states.

    Args:
        ops: package of the layer.
        dtype: dtype of the layer.
        options: options of the layer.
    """

    def __init__(self, ops, dtype=torch.float64, cache_format=FP8_E4M3, config=SMALL, **options):
        self.ops, self.config, self.cache_format = ops, config, cache_format
        self.weights = make_weights(config, torch.float64)
        self.layer = make_layer(ops, config, self.weights, dtype, cache_format=cache_format, **options)
        self.batch = make_batch(LENS, LENS)
        self.cache = poisoned_cache(self.batch.num_blocks, 16, config, cache_format, dtype)
        self.hidden = torch.randn(sum(LENS), config.hidden_size, dtype=torch.float64).to(dtype)

    def plan(self, common=None):
        common = self.batch.common if common is None else common
        return self.ops.build_mla_metadata(common, 16, 64, cache_format=self.cache_format)

    def prefill(self, hidden=None, common=None):
        """Run the step with all tokens of both requests."""
        hidden = self.hidden if hidden is None else hidden
        return self.layer(hidden, self.batch.positions, self.cache, self.plan(common))

    def decode(self):
        """Run a step with the last token of each request."""
        last = torch.tensor(LENS) - 1
        common = step_of(self.batch, tuple((1, length) for length in LENS))
        return self.layer(self.hidden[: len(LENS)], last, self.cache, self.plan(common))

    def largest(self, hidden=None):
        """Return the largest absolute value of the entries of all tokens."""
        hidden = self.hidden if hidden is None else hidden
        _, kv_c, k_pe = self.layer.project(hidden, self.batch.positions)
        return largest_entry(kv_c, k_pe)


# The sources, in their order.


def test_argument(ops):
    """The scale of the argument is used, whatever the first prefill writes."""
    for value in (0.25, torch.tensor(0.25), torch.tensor([0.25], dtype=torch.bfloat16)):
        case = Case(ops, kv_scale=value)
        assert case.layer.kv_scale.source is ScaleSource.ARGUMENT
        case.prefill()
        assert case.layer.kv_scale.value.item() == 0.25 and case.layer.kv_scale.source is ScaleSource.ARGUMENT


@pytest.mark.parametrize("scales", [{"k_scale": 0.5}, {"kv_scale": torch.tensor([0.5])},
                                    {"kv_scale": torch.tensor(0.5), "k_scale": torch.tensor(0.5)},
                                    {"k_scale": 0.5, "q_scale": 0.125, "v_scale": 8.0}], ids=str)  # fmt: skip
def test_checkpoint(ops, scales):
    """`from_hf` takes the scale of the checkpoint; an argument has priority over it."""
    module = hf_module(SMALL, **scales)
    layer = ops.MLAAttention.from_hf(module, cache_format=FP8_E4M3)
    assert layer.kv_scale.value.item() == 0.5 and layer.kv_scale.source is ScaleSource.CHECKPOINT
    layer = ops.MLAAttention.from_hf(module, cache_format=FP8_E4M3, kv_scale=2.0)
    assert layer.kv_scale.value.item() == 2.0 and layer.kv_scale.source is ScaleSource.ARGUMENT
    assert ops.MLAAttention.from_hf(module).kv_scale is None
    assert ops.MLAAttention.from_hf(hf_module(WIDE, **scales), cache_format=FP8_DS_MLA).kv_scale is None


def test_checkpoint_without_a_scale(ops):
    layer = ops.MLAAttention.from_hf(hf_module(SMALL), cache_format=FP8_E4M3)
    assert layer.kv_scale.source is None and checkpoint_scale(hf_module(SMALL)) is None


@pytest.mark.parametrize(("scales", "message"), [
    ({"k_scale": 0.5, "kv_scale": 0.25}, "kv_scale: expected k_scale 0.5, got 0.25"),
    ({"k_scale": torch.tensor(-1.0)}, "k_scale: expected a finite number above 0"),
    ({"k_scale": torch.tensor([1.0, 2.0])}, "k_scale: expected one scale for each layer"),
])  # fmt: skip
def test_bad_checkpoint(ops, scales, message):
    with pytest.raises(ValueError, match=message):
        ops.MLAAttention.from_hf(hf_module(SMALL, **scales), cache_format=FP8_E4M3)


@pytest.mark.parametrize("cache_format", [COMPUTE_FORMAT, FP8_E4M3], ids=lambda each: each.name)
def test_calibration(ops, cache_format, tmp_path):
    """A calibration records the largest value of all steps of a layer; its file gives the scale to a new layer."""
    case = Case(ops, cache_format=cache_format)
    with ops.calibrate_kv_scales({"layers.0": case.layer}) as scales:
        case.prefill()
        case.prefill(3 * case.hidden)
        case.decode()
        assert scales == {}
    assert case.layer.observed is None
    wanted = max(
        case.largest(), case.largest(3 * case.hidden), case.largest(torch.cat((case.hidden, case.hidden))[:27])
    )
    assert scales["layers.0"] == pytest.approx(wanted.item() / E4M3_MAX, rel=1e-6)
    path = tmp_path / "scales.json"
    ops.save_kv_scales(path, scales)
    assert json.loads(path.read_text())["cache_format"] == "fp8_e4m3"
    loaded = ops.load_kv_scales(path)
    layer = Case(ops, kv_scale=loaded["layers.0"]).layer
    assert layer.kv_scale.value.item() == pytest.approx(scales["layers.0"], rel=1e-6)


def test_calibration_of_both_calls(ops):
    """A calibration also records what `forward_attention` writes; tokens without a slot do not count."""
    case = Case(ops, cache_format=COMPUTE_FORMAT)
    q, kv_c, k_pe = case.layer.project(case.hidden, case.batch.positions)
    kv_c[3, 5] = 700.0
    kv_c[4, 5] = 900.0
    slots = case.batch.common.slot_mapping.clone()
    slots[4] = -1
    plan = case.plan(replace(case.batch.common, slot_mapping=slots))
    with ops.calibrate_kv_scales({"a": case.layer}) as scales:
        case.layer.forward_attention(
            q, kv_c, k_pe, case.cache, plan, q.new_empty(27, SMALL.num_heads, SMALL.v_head_dim)
        )
    assert scales["a"] == pytest.approx(700 / E4M3_MAX)


def test_calibration_without_a_step(ops):
    case = Case(ops)
    message = "layers: expected a step of the layer 'a' in the with block, got no step"
    with pytest.raises(ValueError, match=message), ops.calibrate_kv_scales({"a": case.layer}):
        case.layer(case.hidden, case.batch.positions, case.cache, None)  # a memory-profile run
    message = "layers: expected an attention layer at 'b', got Linear"
    with pytest.raises(ValueError, match=message), ops.calibrate_kv_scales({"b": nn.Linear(2, 2)}):
        pass


@pytest.mark.parametrize("call", ["forward", "forward_attention"])
def test_first_prefill(ops, call):
    """The largest absolute value that the first prefill writes is stored as 448; later steps keep the scale."""
    case = Case(ops)
    assert case.layer.kv_scale.source is None and not case.layer.kv_scale.written
    if call == "forward":
        case.prefill()
    else:
        projected = case.layer.project(case.hidden, case.batch.positions)
        output = case.hidden.new_empty(27, SMALL.num_heads, SMALL.v_head_dim)
        case.layer.forward_attention(*projected, case.cache, case.plan(), output)
    scale = case.layer.kv_scale
    wanted = case.largest() / E4M3_MAX
    torch.testing.assert_close(scale.value, wanted)
    assert scale.source is ScaleSource.FIRST_PREFILL and scale.written
    assert case.cache[case.cache.float().isfinite()].float().abs().max() == E4M3_MAX
    before = scale.value.clone()
    case.prefill(9 * case.hidden)
    case.decode()
    assert torch.equal(scale.value, before)


def test_packages_choose_the_same_scale():
    scales = []
    for ops in (reference, fast):
        torch.manual_seed(0)
        case = Case(ops)
        case.prefill()
        scales.append(case.layer.kv_scale.value)
    torch.testing.assert_close(*scales)


@pytest.mark.parametrize("step", ["decode", "graph"])
def test_decode_before_any_prefill(ops, step):
    """If a decode or a graph comes before any prefill, the scale is 1.0 and one warning says so."""
    case = Case(ops)
    builder = ops.MLAMetadataBuilder(SMALL, 16, 64, 4, cache_format=FP8_E4M3)
    graph = ops.DecodeGraph(
        lambda hidden, positions, plan: case.layer(hidden, positions, case.cache, plan), builder, [2],
        case.batch.common.block_table.shape[1], SMALL.hidden_size, torch.float64, case.hidden.device,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="kv_scale: a cache with one scale is written before any prefill"):
        if step == "decode":
            case.decode()
        else:
            common = step_of(case.batch, tuple((1, length) for length in LENS))
            graph.run(case.hidden[:2], torch.tensor(LENS) - 1, common)
    assert case.layer.kv_scale.value.item() == 1.0 and case.layer.kv_scale.source is ScaleSource.DEFAULT
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        case.decode()
        case.prefill()
    assert case.layer.kv_scale.value.item() == 1.0


# What never sets a scale.


@pytest.mark.parametrize("garbage", [1e4, float("nan"), float("inf")])
def test_padding_never_sets_a_scale(ops, garbage):
    """Padding tokens, requests of length 0 and tokens without a slot do not count, whatever values they have."""
    case = Case(ops)
    case.batch = make_batch((1, *LENS), (0, *LENS), padding=4)
    case.cache = poisoned_cache(case.batch.num_blocks, 16, SMALL, FP8_E4M3, torch.float64)
    common = replace(case.batch.common, num_actual_tokens=28)
    hidden = torch.cat((torch.full((1, SMALL.hidden_size), garbage), case.hidden,
                        torch.full((4, SMALL.hidden_size), garbage)))  # fmt: skip
    positions = torch.cat((case.batch.positions, torch.zeros(4, dtype=torch.int64)))
    case.layer(hidden, positions, case.cache, case.plan(common))
    _, kv_c, k_pe = case.layer.project(case.hidden, case.batch.positions[1:])
    torch.testing.assert_close(case.layer.kv_scale.value, largest_entry(kv_c, k_pe) / E4M3_MAX)


def test_steps_that_write_nothing_choose_no_scale(ops):
    """A memory-profile run, a step without tokens and a prefill without slots leave the choice to a later step."""
    case = Case(ops)
    case.layer(case.hidden, case.batch.positions, case.cache, None)
    empty = make_batch((0,), (0,))
    case.layer(case.hidden[:0], empty.positions, case.cache, case.plan(empty.common))
    common = case.batch.common
    case.prefill(common=replace(common, slot_mapping=torch.full_like(common.slot_mapping, -1)))
    assert case.layer.kv_scale.source is None and not case.layer.kv_scale.written
    assert case.cache.view(torch.uint8).eq(0xFF).all()
    case.prefill()
    assert case.layer.kv_scale.source is ScaleSource.FIRST_PREFILL


def test_zeros_choose_no_scale(ops):
    """Entries that are all zeros choose no scale, because every scale stores zeros exactly."""
    case = Case(ops)
    case.prefill(torch.zeros_like(case.hidden))
    assert case.layer.kv_scale.source is None
    case.prefill()
    torch.testing.assert_close(case.layer.kv_scale.value, case.largest() / E4M3_MAX)


def test_refused_step_chooses_no_scale(ops):
    """A step that a check refuses chooses no scale."""
    case = Case(ops)
    with pytest.raises(ValueError, match="metadata"):
        case.layer(
            case.hidden, case.batch.positions, case.cache, case.ops.build_mla_metadata(case.batch.common, 16, 64)
        )
    slots = case.batch.common.slot_mapping.clone()
    slots[2] = 10**6
    with pytest.raises(ValueError, match="slot"):
        case.prefill(common=replace(case.batch.common, slot_mapping=slots))
    assert case.layer.kv_scale.source is None


def test_warmup_sets_no_scale(monkeypatch):
    """`warmup` runs one layer, whose scale 1.0 is an argument: no step chooses a scale, and there is no warning."""
    for name, value in (("LONG_CONTEXT", 200), ("ALONE", (64,)), ("MANY_REQUESTS", 3), ("CASCADE_TOKENS", (2,)),
                        ("CASCADE_PREFIXES", (64,))):  # fmt: skip
        monkeypatch.setattr(fast.compilation, name, value)
    before_write, steps = KVScale.before_write, []

    def noting(scale, has_prefill, largest):
        steps.append((scale, scale.source))
        return before_write(scale, has_prefill, largest)

    monkeypatch.setattr(KVScale, "before_write", noting)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast.warmup(SMALL, device="cpu", dtype=torch.float32, block_size=64, cache_format=FP8_E4M3, progress=False)
    assert len({scale for scale, _ in steps}) == 1
    for scale, source in steps:
        assert source is scale.source is ScaleSource.ARGUMENT and scale.value.item() == 1.0


def test_ranks_agree(ops):
    """Each rank writes only some tokens, and all ranks choose the scale that a single rank with all tokens chooses."""
    config = replace(LOW_RANK, num_heads=4)
    weights, batch = make_weights(config, torch.float64), make_batch(LENS, LENS)
    hidden = torch.randn(27, config.hidden_size, dtype=torch.float64)
    hidden[17] *= 50  # this token has the largest entry

    def program(ranks):
        options = {} if ranks is None else {"ownership": ranks.ownership}
        layer = make_rank_layer(ops, config, weights, torch.float64, ranks, "cpu", cache_format=FP8_E4M3)
        common = batch.common if ranks is None else of_rank(batch.common, 16, ranks.ownership)
        cache = poisoned_cache(batch.num_blocks, 16, config, FP8_E4M3, torch.float64)
        plan = ops.build_mla_metadata(common, 16, 64, cache_format=FP8_E4M3, **options)
        layer(hidden, batch.positions, cache, plan)
        assert layer.kv_scale.source is ScaleSource.FIRST_PREFILL
        return layer.kv_scale.value

    wanted = program(None)
    for size in (2, 4):
        for found in ops.simulate(size, 1, program):
            assert torch.equal(found, wanted)


# When the scale is fixed, and which operations keep the scale.


def test_change_after_the_first_write(ops):
    """A scale can be changed before the first write, and not after it."""
    case = Case(ops, kv_scale=0.5)
    case.layer.kv_scale.choose(0.25)
    assert case.layer.kv_scale.value.item() == 0.25
    case.prefill()
    for value in (0.5, 0.25, torch.tensor(0.5)):
        with pytest.raises(ValueError, match="kv_scale: expected no change after the first write to the cache"):
            case.layer.kv_scale.choose(value)
    assert case.layer.kv_scale.value.item() == 0.25


def test_buffer_changed_in_place(ops):
    """Change the buffer of the scale without `choose` -> the next step raises and writes nothing; copies are legal."""
    case = Case(ops, kv_scale=0.5)
    case.prefill()
    copy.deepcopy(case.layer).to("cpu", torch.float32)
    twin = copy.deepcopy(case.layer)
    twin(case.hidden, case.batch.positions, case.cache.clone(), case.plan())
    before = case.cache.clone().view(torch.uint8)
    case.layer.kv_scale.value.copy_(torch.tensor(0.25))
    for step in (case.prefill, case.decode):
        with pytest.raises(ValueError, match="^kv_scale: expected a scale that only KVScale.choose changes, got"):
            step()
    assert_same_bits(case.cache.view(torch.uint8), before)


def test_made_in_inference_mode(ops):
    """Make, move and copy scales in inference mode -> their buffers can still be changed outside of it."""
    with torch.inference_mode():
        scales = [ops.KVScale(0.5), ops.QueryScale(0.5, 3), ops.QueryScale(torch.ones(3), 3)]
        scales += [copy.deepcopy(scale) for scale in scales] + [ops.KVScale(0.5).to("meta").to_empty(device="cpu")]
    for scale in scales:
        assert not scale.value.is_inference()
        scale.choose(0.25)
        assert scale.value.eq(0.25).all()


def test_scale_stays_float32(ops):
    """A cast of the layer keeps the bits of the scale; the state dict has no scale."""
    case = Case(ops, torch.float32)
    case.prefill()
    before, value = case.layer.kv_scale.value.clone(), case.layer.kv_scale.value
    for cast in (case.layer.to(torch.bfloat16), case.layer.half(), case.layer.double()):
        assert cast.kv_scale.value.dtype == torch.float32 and torch.equal(cast.kv_scale.value, before)
    assert case.layer.kv_scale.value is value or torch.equal(case.layer.kv_scale.value, value)
    assert not any("scale" in name for name in case.layer.state_dict())
    assert any(buffer is case.layer.kv_scale.value for buffer in case.layer.buffers())
    hidden = case.hidden.double()
    case.layer(hidden, case.batch.positions, case.cache, case.plan())


def test_copy_of_a_layer(ops):
    """A deep copy has the scale of the layer; if the layer has no scale yet, the copy chooses its own."""
    case = Case(ops)
    other = copy.deepcopy(case.layer)
    case.prefill()
    assert other.kv_scale.source is None
    later = copy.deepcopy(case.layer)
    assert torch.equal(later.kv_scale.value, case.layer.kv_scale.value) and later.kv_scale.written
    assert later.kv_scale.value.data_ptr() != case.layer.kv_scale.value.data_ptr()
    case.layer = later
    assert_same_bits(case.decode(), case.decode())


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e-60, torch.zeros(()), torch.ones(2)],
                         ids=str)  # fmt: skip
def test_bad_values(ops, value):
    with pytest.raises(ValueError, match="kv_scale: expected"):
        Case(ops, kv_scale=value)


def test_bad_types(ops, plain_errors):
    for value in ("1.0", True, [1.0]):
        with pytest.raises(TypeError, match="kv_scale: expected a number or a tensor"):
            Case(ops, kv_scale=value)
    for cache_format, config in ((COMPUTE_FORMAT, SMALL), (FP8_DS_MLA, WIDE)):
        with pytest.raises(ValueError, match=f"kv_scale: expected None for format {cache_format.name}"):
            Case(ops, cache_format=cache_format, config=config, kv_scale=1.0)


def test_scale_on_another_device(ops):
    """A layer whose scale is on another device than the cache raises before it writes."""
    case = Case(ops, kv_scale=0.5)
    case.layer.kv_scale.value = case.layer.kv_scale.value.to("meta")
    with pytest.raises(ValueError, match="kv_scale: expected .*got .*meta"):
        case.prefill()
    assert case.cache.view(torch.uint8).eq(0xFF).all()


def test_functions_need_the_scale(ops):
    """Every function over a cache with a scale refuses a call without a scale; other formats refuse a scale."""
    case = Case(ops)
    case.prefill()
    step, prefill = case.plan(step_of(case.batch, ((1, 20), (1, 7)))), case.plan(step_of(case.batch, ((4, 20), (3, 7))))
    q = torch.randn(7, SMALL.num_heads, SMALL.qk_head_dim, dtype=torch.float64)
    kv_c, k_pe = torch.randn(7, 32, dtype=torch.float64), torch.randn(7, 16, dtype=torch.float64)
    ql = torch.randn(2, SMALL.num_heads, 32, dtype=torch.float64)
    calls = {
        "mla_decode": lambda **scale: ops.mla_decode(
            ql, q[:2, :, 16:], case.cache, step.decode, 1.0, cache_format=FP8_E4M3, **scale),
        "gather_context": lambda **scale: ops.gather_context(
            case.cache, prefill.prefill, prefill.prefill.context_chunks[0], FP8_E4M3, torch.float64, **scale),
        "forward_prefill": lambda **scale: ops.forward_prefill(
            q, kv_c, k_pe, case.cache, prefill.prefill, *case.layer.up_projections(), 1.0, cache_format=FP8_E4M3,
            **scale),
        "concat_and_cache_mla": lambda **scale: ops.concat_and_cache_mla(
            kv_c, k_pe, case.cache, prefill.slot_mapping, FP8_E4M3, **scale),
    }  # fmt: skip
    for call in calls.values():
        with pytest.raises(ValueError, match=r"kv_scale: expected a float32 tensor \[\] for format fp8_e4m3, got None"):
            call()
        with pytest.raises(ValueError, match="kv_scale: expected"):
            call(kv_scale=torch.tensor(1.0, dtype=torch.float64))
        call(kv_scale=case.layer.kv_scale.value)
    compute = poisoned_cache(case.batch.num_blocks, 16, SMALL, COMPUTE_FORMAT, torch.float64)
    with pytest.raises(ValueError, match="kv_scale: expected None for format compute_dtype"):
        ops.mla_decode(ql, q[:2, :, 16:], compute, step.decode, 1.0, kv_scale=torch.tensor(1.0))


def test_swap_between_layers_of_unequal_scales(ops):
    """`swap_blocks` refuses caches whose scales differ, and writes nothing."""
    source, target = Case(ops, kv_scale=0.5), Case(ops, kv_scale=0.25)
    source.prefill()
    scales = source.layer.kv_scale.value, target.layer.kv_scale.value
    pairs = torch.tensor([[0, 1]])
    with pytest.raises(ValueError, match="target_scale: expected 0.5, the scale of source, got 0.25"):
        ops.swap_blocks(source.cache, target.cache, pairs, *scales)
    with pytest.raises(ValueError, match="target_scale: expected"):
        ops.swap_blocks(source.cache, target.cache, pairs, scales[0])
    assert target.cache.view(torch.uint8).eq(0xFF).all()
    ops.swap_blocks(source.cache, target.cache, pairs, scales[0], scales[0].clone())
    assert_same_bits(target.cache[1], source.cache[0])


# The file of a calibration.


def test_file(ops, tmp_path):
    path = tmp_path / "scales.json"
    scales = {"model.layers.0": 0.125, "model.layers.1": 3.5}
    ops.save_kv_scales(path, scales)
    assert ops.load_kv_scales(path) == scales
    ops.save_kv_scales(str(path), {"a": 1.0})
    assert ops.load_kv_scales(str(path)) == {"a": 1.0}


@pytest.mark.parametrize(("content", "message"), [
    ("{", "path: expected a JSON file of save_kv_scales"),
    ("[1]", "path: expected a JSON file of save_kv_scales"),
    ('{"kv_scales": {"a": 1.0}}', "path: expected a cache_format among"),
    ('{"cache_format": "fp8_ds_mla", "kv_scales": {"a": 1.0}}', "path: expected scales for format fp8_e4m3"),
    ('{"cache_format": "fp8_e4m3", "kv_scales": {"a": 0}}', r"kv_scales\['a'\]: expected a finite number above 0"),
    ('{"cache_format": "fp8_e4m3", "kv_scales": {"a": NaN}}', r"kv_scales\['a'\]: expected a finite number above 0"),
    ('{"cache_format": "fp8_e4m3", "kv_scales": {"a": -2}}', r"kv_scales\['a'\]: expected a finite number above 0"),
])  # fmt: skip
def test_bad_files(ops, tmp_path, content, message):
    path = tmp_path / "scales.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        ops.load_kv_scales(path)


def test_bad_saves(ops, tmp_path):
    for scales, cache_format, message in (
        ({"a": 0.0}, FP8_E4M3, r"scales\['a'\]: expected a finite number above 0"),
        ({"a": 1.0}, FP8_DS_MLA, "cache_format: expected a format with one scale for each layer, got fp8_ds_mla"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.save_kv_scales(tmp_path / "scales.json", scales, cache_format)
    assert not (tmp_path / "scales.json").exists()


def test_no_attention_module(ops):
    with pytest.raises(UnsupportedConfiguration, match="module: expected a DeepseekV2Attention"):
        ops.MLAAttention.from_hf(nn.Linear(2, 2))
    assert isinstance(MLAConfig.from_hf(hf_module(SMALL).config).rope, RopeConfig)


def test_scale_object():
    """Use a `KVScale` without a layer -> the first write sets the scale: largest value / 448, and never 0."""
    scale = KVScale()
    assert scale.value.item() == 1.0 and scale.source is None
    assert scale.before_write(True, lambda: torch.tensor(1e-44)).item() == torch.finfo(torch.float32).tiny
    with pytest.raises(ValueError, match="no change after the first write"):
        scale.choose(1.0)
    scale = KVScale()
    assert scale.before_write(True, lambda: torch.tensor(896.0)).item() == 2.0


def test_a_scale_of_a_layer_made_on_meta():
    """Move a scale from the device meta, which holds no numbers, to the CPU -> the chosen number."""
    with torch.device("meta"):
        scale = KVScale(0.25)
    assert scale.to_empty(device="cpu").value.item() == 0.25
