"""Tests of `use_mla` over caches in e4m3: storage, sources of the scales, calibration, and errors.

`use_mla` makes a DeepSeek model of transformers compute its attention with `reference` or `fast`, over a paged cache of
latents. The format of the cache decides the dtype of the cache and which numbers it can store.
"""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch

pytest.importorskip("transformers", reason="the integration runs transformers models")
from transformers.cache_utils import DynamicCache

import fast
import reference
from fast.demo.serving import ServingLoop
from fast.integrations.transformers import calibrate_model, mla_layers, restore, use_mla
from fast.parity import compare
from reference.interfaces import FP8_E4M3, ScaleSource, save_kv_scales

from ...support.transformers_models import (
    BLOCK,
    GREEDY,
    HEAD_SIZE,
    LAYERS,
    STOCK,
    VOCAB,
    WITHOUT_SHAPE_CHECKS,
    attributes,
    packed_step,
    padded_batch,
    served,
)

NAMES = [f"layers.{index}.self_attn" for index in range(LAYERS)]
SCALES = dict(zip(NAMES, (0.01, 0.03), strict=True))
MODEL = "v3-yarn"


def prompts():
    ids, mask = padded_batch()
    return [dict(input_ids=ids, attention_mask=mask)]


def scales_of(model) -> list[float]:
    return [float(layer.kv_scale.value) for layer in mla_layers(model).values()]


def sources_of(model) -> set[ScaleSource]:
    return {layer.kv_scale.source for layer in mla_layers(model).values()}


def rounded(scales) -> list[float]:
    return torch.tensor(list(scales), dtype=torch.float32).tolist()


# storage


@pytest.mark.parametrize("cache_format", ["fp8_e4m3", FP8_E4M3], ids=["name", "record"])
def test_caches_have_the_dtype_and_columns_of_the_format(ops, cache_format):
    """Run a padded batch with the format fp8_e4m3 -> a cache in e4m3, which has one byte for each element."""
    model = served(MODEL, ops, cache_format=cache_format, kv_scales=SCALES)
    ids, mask = padded_batch()
    with torch.no_grad():
        past = model(ids, attention_mask=mask, use_cache=True).past_key_values
    for layer in past.layers:
        assert layer.kv_cache.dtype == torch.float8_e4m3fn and layer.kv_cache.shape[2] == HEAD_SIZE
        assert layer.kv_cache.nbytes == layer.kv_cache.shape[0] * BLOCK * HEAD_SIZE
    assert sources_of(model) == {ScaleSource.ARGUMENT} and scales_of(model) == rounded(SCALES.values())


@pytest.mark.parametrize("decode_threshold", [1, 64])
def test_steps_read_what_the_cache_stores(ops, decode_threshold):
    """Run three calls over one cache in e4m3 -> errors of the logits within the budget (docs/correctness.md).

    Both paths read the cache: prefills (threshold 1) expand the dequantised context, and decodes (threshold 64) attend
    the stored entries directly.
    """
    ids, mask = padded_batch()

    def scenario(package):
        options = dict(decode_threshold=decode_threshold, cache_format="fp8_e4m3", kv_scales=SCALES)
        model = served(MODEL, package, **options)
        cache = DynamicCache()
        with torch.no_grad():
            logits = [
                model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache).logits
                for start, end in ((0, 5), (5, 6), (6, 11))
            ]
        return torch.cat(logits, dim=1)[mask.bool()], cache

    value, stored = scenario(ops)
    low, expected = scenario(reference)
    for layer, other in zip(stored.layers, expected.layers, strict=True):
        ours, theirs = (each.kv_cache.view(torch.uint8).int() for each in (layer, other))
        owned = torch.zeros(ours.shape[:2], dtype=torch.bool)
        owned.view(3, -1)[torch.arange(owned.numel() // 3) < layer.record.lens[:, None]] = True
        # activations of the packages differ in their last bits, so a number may be rounded to the next e4m3 number
        assert ((ours - theirs)[owned].abs() <= 1).all()
    with torch.no_grad():
        gold = STOCK[MODEL](ids, attention_mask=mask).logits[mask.bool()].double()
    assert compare("logits", value, low, gold).passed


@WITHOUT_SHAPE_CHECKS
def test_generate_reorder_and_crop(ops):
    """Generate with beams, which reorders rows of the e4m3 cache -> the same tokens with `reference` and `fast`."""
    ids, mask = padded_batch()
    found = []
    for package in (reference, ops):
        model = served(MODEL, package, cache_format="fp8_e4m3", kv_scales=SCALES)
        found.append(model.generate(ids, attention_mask=mask, **{**GREEDY, "num_beams": 2}))
    assert torch.equal(*found)


def test_packed_batch_takes_caches_of_the_format(ops, plain_errors):
    """Pass a packed batch with caches in another dtype or a plan for another format -> an error; nothing is written."""
    model = served(MODEL, ops, cache_format="fp8_e4m3", kv_scales=SCALES)
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    step = packed_step(ops, [6], [6], table)
    ids = torch.ones(1, 6, dtype=torch.long)
    plain = [torch.zeros(2, BLOCK, HEAD_SIZE) for _ in range(LAYERS)]
    with pytest.raises(ValueError, match=r"^mla_kv_caches\[0\]: expected dtype torch.float8_e4m3fn, got torch.float32"):
        model(ids, mla_kv_caches=plain, **step)
    caches = [cache.to(torch.float8_e4m3fn) for cache in plain]
    wanted = "^metadata.cache_format: expected fp8_e4m3, the layer's format, got compute_dtype$"
    with pytest.raises(ValueError, match=wanted):
        model(ids, mla_kv_caches=caches, **step)
    assert not any(cache.view(torch.uint8).any() for cache in caches)


def test_serving_loop_counts_the_bytes_of_the_format(ops):
    model = served(MODEL, ops, cache_format="fp8_e4m3")
    config = next(iter(mla_layers(model).values())).config
    sizes = dict(num_blocks=8, block_size=BLOCK, max_num_seqs=2, token_budget=8, workspace_tokens=16)
    loop = ServingLoop(model, config, ops, **sizes)
    loop.add([1, 2, 3, 4, 5], 2)
    report = loop.step()
    assert {cache.dtype for cache in loop.kv_caches} == {torch.float8_e4m3fn}
    assert report.cache_bytes == 2 * BLOCK * HEAD_SIZE * LAYERS  # two blocks; an element has one byte
    loop.run()
    assert sources_of(model) == {ScaleSource.FIRST_PREFILL}


# sources of the scales


def with_checkpoint_scales(model, name="k_scale"):
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.register_parameter(name, torch.nn.Parameter(torch.tensor([0.5 + index]), requires_grad=False))
    return model


def test_order_of_the_sources(model, ops, tmp_path):
    """Give scales from several sources -> priority: argument, checkpoint, calibration file, first prefill."""
    path = tmp_path / "scales.json"
    save_kv_scales(path, SCALES)
    options = dict(ops=ops, block_size=BLOCK, workspace_tokens=16, cache_format="fp8_e4m3")
    use_mla(model, kv_scales=path, **options)
    assert scales_of(model) == rounded(SCALES.values())
    restore(model)
    with_checkpoint_scales(model)
    for kv_scales, expected, source in (
        (SCALES, rounded(SCALES.values()), ScaleSource.ARGUMENT),
        (str(path), [0.5, 1.5], ScaleSource.CHECKPOINT),
        (None, [0.5, 1.5], ScaleSource.CHECKPOINT),
    ):
        use_mla(model, kv_scales=kv_scales, **options)
        assert (scales_of(model), sources_of(model)) == (expected, {source})
        restore(model)


def test_first_prefill_chooses_the_scale(ops):
    """Serve a prompt without scales -> the largest e4m3 number in a cache is 448, and later steps keep the scales."""
    model = served(MODEL, ops, cache_format="fp8_e4m3")
    ids, mask = padded_batch()
    assert sources_of(model) == {None}
    with torch.no_grad():
        past = model(ids, attention_mask=mask, use_cache=True).past_key_values
    assert sources_of(model) == {ScaleSource.FIRST_PREFILL}
    for layer in past.layers:
        owned = layer.kv_cache.float().view(3, -1, HEAD_SIZE)
        assert max(owned[row, :count].abs().max() for row, count in enumerate(layer.record.lens)) == 448
    before = scales_of(model)
    with torch.no_grad():
        model(torch.randint(1, VOCAB, (1, 9)))
    assert scales_of(model) == before


def test_decode_before_any_prefill_warns(ops):
    model = served(MODEL, ops, cache_format="fp8_e4m3", decode_threshold=64)
    with torch.no_grad(), pytest.warns(UserWarning, match="^kv_scale: a cache with one scale is written before any"):
        model(torch.randint(1, VOCAB, (1, 4)))
    assert scales_of(model) == [1.0] * LAYERS and sources_of(model) == {ScaleSource.DEFAULT}


def test_one_scale_for_all_layers(ops):
    assert scales_of(served(MODEL, ops, cache_format="fp8_e4m3", kv_scale=0.25)) == [0.25] * LAYERS


@WITHOUT_SHAPE_CHECKS
def test_calibration_of_a_model(model, ops, tmp_path):
    """Calibrate a model, save the scales and load them -> the same scales; the model is unchanged by the calibration.

    Here the calibration runs only the prompts. A first prefill of the same prompts therefore finds the same scales.
    """
    before, batches = attributes(model), prompts()
    scales = calibrate_model(model, batches, ops, max_new_tokens=1, block_size=BLOCK)
    assert list(scales) == NAMES and attributes(model) == before
    fast.save_kv_scales(tmp_path / "scales.json", scales)
    options = dict(ops=ops, block_size=BLOCK, cache_format="fp8_e4m3")
    use_mla(model, kv_scales=tmp_path / "scales.json", **options)
    found = scales_of(model)
    assert found == rounded(scales.values())
    restore(model)
    use_mla(model, **options)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        model(**batches[0])
    assert scales_of(model) == pytest.approx(found)  # activations of the two runs can differ in their last bits


# caches and layers that do not fit together


def test_a_cache_of_another_format_or_scale_is_refused(model, ops, plain_errors):
    """Pass a filled cache to layers with another format or with other scales -> an error before anything is written."""
    ids = torch.randint(1, VOCAB, (2, 5))
    options = dict(ops=ops, block_size=BLOCK, workspace_tokens=16)
    use_mla(model, cache_format="fp8_e4m3", kv_scales=SCALES, **options)
    with torch.no_grad():
        past = model(ids, use_cache=True).past_key_values
    before = [layer.kv_cache.clone().view(torch.uint8) for layer in past.layers]
    restore(model)
    for other, message in (
        ({}, "^past_key_values: expected entries in torch.float32, got torch.float8_e4m3fn$"),
        (
            dict(cache_format="fp8_e4m3", kv_scale=0.5),
            "^past_key_values: expected tokens stored with the scale 0.5, got 0.00999",
        ),
    ):
        use_mla(model, **options, **other)
        with pytest.raises(ValueError, match=message):
            model(ids[:, :1], past_key_values=past)
        restore(model)
    for layer, held in zip(past.layers, before, strict=True):
        assert torch.equal(layer.kv_cache.view(torch.uint8), held)
    use_mla(model, cache_format="fp8_e4m3", kv_scales=SCALES, **options)  # new layers with the same scales are legal
    with torch.no_grad():
        model(ids[:, :1], past_key_values=copy.deepcopy(past))


def calibration_file(folder, text=None, cache_format="fp8_e4m3", scales=SCALES):
    path = folder / "file.json"
    path.write_text(text or json.dumps({"cache_format": cache_format, "kv_scales": scales}))
    return path


FP8 = dict(cache_format="fp8_e4m3")
REFUSED = {
    "unknown format": (
        lambda folder: dict(cache_format="fp8"),
        "^cache_format: expected one of compute_dtype, fp8_e4m3, fp8_ds_mla, got fp8$",
    ),
    "no format": (lambda folder: dict(cache_format=8), "^cache_format: expected a CacheFormat or the name of a format"),
    "dims": (
        lambda folder: dict(cache_format="fp8_ds_mla"),
        r"^cache_format: expected \(Lkv, R\) = \(512, 64\) for format fp8_ds_mla, got \(32, 8\)$",
    ),
    "file of another format": (
        lambda folder: dict(FP8, kv_scales=calibration_file(folder, cache_format="fp8_ds_mla")),
        "^path: expected scales for format fp8_e4m3, got fp8_ds_mla$",
    ),
    "file without a layer": (
        lambda folder: dict(FP8, kv_scales=calibration_file(folder, scales={NAMES[0]: 0.1})),
        "^kv_scales: expected a scale for each of 2 layers, got none for layers.1.self_attn$",
    ),
    "layer of another model": (
        lambda folder: dict(FP8, kv_scales={**SCALES, "layers.7.self_attn": 0.1}),
        "^kv_scales: expected the 2 layers of the model, got a scale for layers.7.self_attn$",
    ),
    "broken file": (
        lambda folder: dict(FP8, kv_scales=calibration_file(folder, text="{")),
        "^path: expected a JSON file of save_kv_scales, got ",
    ),
    "scales for compute_dtype": (
        lambda folder: dict(kv_scales=SCALES),
        "^kv_scales: expected None for format compute_dtype, got a mapping$",
    ),
    "scale for compute_dtype": (
        lambda folder: dict(kv_scale=1.0),
        "^kv_scale: expected None for format compute_dtype, got 1.0$",
    ),
    "two arguments": (
        lambda folder: dict(FP8, kv_scales=SCALES, kv_scale=1.0),
        "^kv_scale: expected no argument beside kv_scales, got 1.0$",
    ),
    "another type": (
        lambda folder: dict(FP8, kv_scales=0.5),
        "^kv_scales: expected a mapping, the path of a calibration file, or None, got float$",
    ),
    "zero": (
        lambda folder: dict(FP8, kv_scales=dict.fromkeys(NAMES, 0.0)),
        "^kv_scale: expected a finite number above 0, got 0.0$",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_formats_and_scales_leave_the_model_unchanged(model, ops, tmp_path, case, plain_errors):
    options, message = REFUSED[case]
    before = attributes(model)
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        use_mla(model, ops=ops, **options(tmp_path))
    assert "\n" not in str(caught.value) and attributes(model) == before


def test_a_missing_calibration_file(model, ops, tmp_path):
    with pytest.raises(FileNotFoundError):
        use_mla(model, ops=ops, cache_format="fp8_e4m3", kv_scales=tmp_path / "none.json")


def test_two_different_scales_of_a_checkpoint(model, ops):
    with_checkpoint_scales(with_checkpoint_scales(model), "kv_scale")
    model.model.layers[0].self_attn.kv_scale.data.fill_(3.0)
    with pytest.raises(ValueError, match="^kv_scale: expected k_scale 0.5, got 3.0$"):
        use_mla(model, ops=ops, cache_format="fp8_e4m3")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(prompts=[]), "^prompts: expected at least one batch of prompts, got none$"),
        (dict(prompts=["text"]), "^prompts: expected batches that are mappings"),
        (dict(prompts=[{}], max_new_tokens=0), "^max_new_tokens: expected at least 1, got 0$"),
        (dict(prompts=[{}], kv_scales=SCALES), "^options: expected no formats, modes or scales, .*, got kv_scales$"),
    ],
)
def test_calibrate_model_refuses(model, arguments, message, plain_errors):
    before = attributes(model)
    with pytest.raises((ValueError, TypeError), match=message):
        calibrate_model(model, **arguments)
    assert attributes(model) == before


def test_layers_of_a_model_that_is_not_served(model):
    with pytest.raises(ValueError, match="^model: expected a model under use_mla, got another forward at layers.0"):
        mla_layers(model)
