"""Tests of `use_mla` with queries in e4m3 (8 bits): the options `fp8_mode` and `q_scales`, and their calibration.

The modes of a decode over a cache in e4m3 are explained at `reference.mla_decode`.
"""

from __future__ import annotations

import json
import warnings

import pytest
import torch

pytest.importorskip("transformers", reason="the integration runs transformers models")

import fast
import reference
from fast.integrations.transformers import calibrate_model, mla_layers, restore, use_mla
from reference.interfaces import CalibratedScales, ScaleSource, load_kv_scales

from ...support.transformers_models import BLOCK, GREEDY, LAYERS, WITHOUT_SHAPE_CHECKS, attributes, padded_batch, served

NAMES = [f"layers.{index}.self_attn" for index in range(LAYERS)]
KV, Q = (dict(zip(NAMES, values, strict=True)) for values in ((0.01, 0.03), (0.02, 0.05)))
MODEL = "v3-yarn"
FP8 = dict(cache_format="fp8_e4m3", fp8_mode="fp8_query")


def q_scales_of(model):
    return [float(layer.q_scale.value) for layer in mla_layers(model).values()]


def sources_of(model):
    return {layer.q_scale.source for layer in mla_layers(model).values()}


def rounded(scales):
    return torch.tensor(list(scales), dtype=torch.float32).tolist()


@WITHOUT_SHAPE_CHECKS
def test_generate(ops):
    """Generate in the mode fp8_query -> both packages give the same tokens; layers have the mode and the scales."""
    ids, mask = padded_batch()
    found = {}
    for package in (reference, ops):
        model = served(MODEL, package, **FP8, kv_scales=KV, q_scales=Q)
        assert {layer.fp8_mode for layer in mla_layers(model).values()} == {"fp8_query"}
        assert q_scales_of(model) == rounded(Q.values()) and sources_of(model) == {ScaleSource.ARGUMENT}
        found[package] = model.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(found[reference], found[ops])


@pytest.mark.parametrize("mode", ["fp8_query", "fp8_product"])
def test_decodes_differ_from_converted(ops, mode):
    """Decode prompts in fp8_query or fp8_product -> finite logits that differ from those in the mode `converted`."""
    ids, mask = padded_batch()
    logits = []
    for options in ({}, {"fp8_mode": mode, "q_scales": Q}):
        model = served(MODEL, ops, cache_format="fp8_e4m3", kv_scales=KV, decode_threshold=64, **options)
        with torch.no_grad():
            logits.append(model(ids, attention_mask=mask).logits[mask.bool()])
    assert logits[1].isfinite().all() and not torch.equal(*logits)


def with_checkpoint_scales(model):
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.register_parameter(
            "q_scale", torch.nn.Parameter(torch.tensor([0.5 + index]), requires_grad=False)
        )
    return model


def test_order_of_the_sources(model, ops, tmp_path):
    """Give scales from several sources -> priority: argument, checkpoint, calibration file, 1.0 with a warning."""
    path, without = tmp_path / "scales.json", tmp_path / "without.json"
    fast.save_kv_scales(path, CalibratedScales(KV, Q))
    fast.save_kv_scales(without, KV)
    options = dict(ops=ops, block_size=BLOCK, workspace_tokens=16, **FP8)
    for given, expected in (
        (dict(kv_scales=path), Q.values()), (dict(q_scales=str(path)), Q.values()),
        (dict(kv_scales=CalibratedScales(KV, Q)), Q.values()), (dict(q_scale=0.25), [0.25] * LAYERS),
    ):  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            use_mla(model, **given, **options)
        assert q_scales_of(model) == rounded(expected)
        restore(model)
    for given in ({}, dict(kv_scales=without), dict(kv_scales=KV)):
        with pytest.warns(UserWarning, match="^q_scale: a layer with fp8_mode fp8_query has no scale"):
            use_mla(model, **given, **options)
        assert q_scales_of(model) == [1.0] * LAYERS and sources_of(model) == {ScaleSource.DEFAULT}
        restore(model)
    with_checkpoint_scales(model)
    for given, expected, source in (
        (dict(q_scales=Q), rounded(Q.values()), ScaleSource.ARGUMENT), ({}, [0.5, 1.5], ScaleSource.CHECKPOINT),
        (dict(kv_scales=path), [0.5, 1.5], ScaleSource.CHECKPOINT),
        (dict(q_scales=path), [0.5, 1.5], ScaleSource.CHECKPOINT),
    ):  # fmt: skip
        use_mla(model, **given, **options)
        assert (q_scales_of(model), sources_of(model)) == (expected, {source})
        restore(model)
    use_mla(model, ops=ops, block_size=BLOCK, cache_format="fp8_e4m3")
    assert all(layer.q_scale is None for layer in mla_layers(model).values())


@WITHOUT_SHAPE_CHECKS
def test_calibration_of_a_model(model, ops, tmp_path):
    """Calibrate a model, decode its prompts with the saved scales -> the largest e4m3 query element is 200 to 448."""
    ids, mask = padded_batch()
    before = attributes(model)
    scales = calibrate_model(model, [dict(input_ids=ids, attention_mask=mask)], ops, max_new_tokens=2, block_size=BLOCK)
    assert list(scales) == list(scales.queries) == NAMES and attributes(model) == before
    assert min(scales.queries.values()) > 0
    fast.save_kv_scales(tmp_path / "scales.json", scales)
    assert load_kv_scales(tmp_path / "scales.json").queries == pytest.approx(scales.queries)
    use_mla(model, ops, block_size=BLOCK, decode_threshold=64, kv_scales=tmp_path / "scales.json", **FP8)
    assert q_scales_of(model) == rounded(scales.queries.values())
    made = []
    package = ops.mla.absorbed_path
    original = package.mla_decode

    def noting(ql_nope, q_pe, *args, **options):
        made.append(max(float(ql_nope.float().abs().max()), float(q_pe.float().abs().max())))
        return original(ql_nope, q_pe, *args, **options)

    package.mla_decode = noting
    try:
        with torch.no_grad():
            model(ids, attention_mask=mask)
    finally:
        package.mla_decode = original
    assert len(made) == LAYERS and 200 < max(made) <= 448


REFUSED = {
    "unknown mode": (
        dict(cache_format="fp8_e4m3", fp8_mode="fp8"),
        "^fp8_mode: expected one of converted, fp8_query, fp8_product, got fp8$",
    ),
    "format": (dict(fp8_mode="fp8_query"), "^fp8_mode: expected converted for format compute_dtype, got fp8_query$"),
    "scales of converted": (
        dict(cache_format="fp8_e4m3", q_scales=Q), "^q_scales: expected None for fp8_mode converted, got a mapping$",
    ),
    "scale of converted": (
        dict(cache_format="fp8_e4m3", q_scale=0.5), "^q_scale: expected None for fp8_mode converted, got 0.5$",
    ),
    "two arguments": (dict(FP8, q_scales=Q, q_scale=0.5), "^q_scale: expected no argument beside q_scales, got 0.5$"),
    "layer without a scale": (
        dict(FP8, q_scales={NAMES[0]: 0.1}),
        "^q_scales: expected a scale for each of 2 layers, got none for layers.1.self_attn$",
    ),
    "layer of another model": (
        dict(FP8, q_scales={**Q, "layers.7.self_attn": 0.1}),
        "^q_scales: expected the 2 layers of the model, got a scale for layers.7.self_attn$",
    ),
    "calibration without queries": (
        dict(FP8, q_scales=CalibratedScales(KV)), "^q_scales: expected a calibration with scales of queries, got none$",
    ),
    "another type": (
        dict(FP8, q_scales=0.5), "^q_scales: expected a mapping, the path of a calibration file, or None, got float$",
    ),
    "zero": (dict(FP8, q_scales=dict.fromkeys(NAMES, 0.0)), "^q_scale: expected a finite number above 0, got 0.0$"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_modes_and_scales_leave_the_model_unchanged(model, ops, case, plain_errors):
    options, message = REFUSED[case]
    before = attributes(model)
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        use_mla(model, ops=ops, **options)
    assert "\n" not in str(caught.value) and attributes(model) == before


def test_a_file_without_queries(model, ops, tmp_path):
    path = tmp_path / "file.json"
    path.write_text(json.dumps({"cache_format": "fp8_e4m3", "kv_scales": KV}))
    with pytest.raises(ValueError, match="^q_scales: expected a calibration with scales of queries, got none$"):
        use_mla(model, ops=ops, q_scales=path, **FP8)


def test_calibrate_model_takes_no_mode(model):
    with pytest.raises(ValueError, match="^options: expected no formats, modes or scales, .*, got fp8_mode, q_scales$"):
        calibrate_model(model, [{}], q_scales=Q, fp8_mode="fp8_query")
