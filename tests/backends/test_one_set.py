"""Tests of backends that hold one set of parameters for all layers, such as one window and one scale.

A Gemma-like model alternates between layers with a window and layers without one. Such a backend cannot serve both.
"""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import fast
import reference
from fast.backends import Backend, OpSupport, check_one_set_of_parameters
from fast.backends.kernel_request import FEATURES
from fast.backends.own import CPU
from reference.interfaces import COMPUTE_FORMAT, FP8_E4M3, QueryLenSupport, UnsupportedConfiguration
from reference.interfaces.gqa import AttentionType, GQAConfig, group_layers

from ..support.backends import registered
from ..support.factories import DIRECT, LOW_RANK

FULL = GQAConfig(8, 2, 64)
WINDOW = replace(FULL, sliding_window=5)
UNIFORM = {f"layers.{index}": WINDOW for index in range(3)}
GEMMA = UNIFORM | {"layers.1": FULL}
CALL = dict(device=torch.device("cpu"), dtype=torch.float32, block_size=16)
PAGED = "gqa_paged_attention"


def one_set(name="global", priority=50, ops=(PAGED,), **changes):
    """Return a backend for CPU tensors that holds one set of parameters."""
    declared = {"one_set_of_parameters": True} | changes
    return Backend(name, priority, "cpu", {op: replace(CPU.ops[op], **declared) for op in ops})


def refused(layers, **options):
    with pytest.raises(UnsupportedConfiguration) as error:
        check_one_set_of_parameters(layers, **CALL | options)
    return error.value.reasons


REASON = ("global: holds one set of parameters for gqa_paged_attention of all layers; layers: expected sliding_window "
          "5 of 'layers.0' in all layers, got None at 'layers.1'")  # fmt: skip


def test_alternating_models(plain_errors):
    """A model that alternates is refused with both layers, whether the backend is chosen or named."""
    check_one_set_of_parameters(GEMMA, **CALL)  # no backend of this package holds one set
    with registered(one_set()):
        assert refused(GEMMA) == refused(GEMMA, backend="global") == refused(GEMMA, backend={PAGED: "global"})
        assert refused(GEMMA) == (REASON,)
        check_one_set_of_parameters(GEMMA, **CALL, backend="cpu")
        for backend in (None, "global", {PAGED: "global"}):
            check_one_set_of_parameters(UNIFORM, **CALL, backend=backend)
            check_one_set_of_parameters({"a": FULL}, **CALL, backend=backend)
        assert len(group_layers(GEMMA)) == 2  # the plans exist; the backend is the limit
    with registered(one_set(priority=-1)):  # the backend "cpu" is chosen
        check_one_set_of_parameters(GEMMA, **CALL)
        assert refused(GEMMA, backend="global") == (REASON,)
    for kind in QueryLenSupport:  # such as a backend for decodes with one query token
        with registered(one_set(query_lens=kind)):
            assert refused(GEMMA) == (REASON,)
    with registered(one_set(ops=(PAGED, "gqa_varlen_attention"))):
        assert [reason.split(";")[0] for reason in refused(GEMMA)] == [
            f"global: holds one set of parameters for {op} of all layers" for op in (PAGED, "gqa_varlen_attention")
        ]


@pytest.mark.parametrize(
    ("change", "field"),
    [(dict(scale=0.5), "softmax_scale"), (dict(logits_soft_cap=2.0), "logits_soft_cap"),
     (dict(attention_sinks=True), "attention_sinks"), (dict(alibi_slopes=(0.5,) * 8), "alibi_slopes"),
     (dict(num_kv_heads=4), "num_kv_heads"), (dict(head_dim=32, scale=0.125), "head_dim")],
    ids=str,
)  # fmt: skip
def test_every_parameter_counts(change, field):
    with registered(one_set()):
        (reason,) = refused({"a": WINDOW, "b": replace(WINDOW, **change)})
    assert re.search(f"layers: expected {field} .* of 'a' in all layers, got .* at 'b'$", reason)


def test_layers_of_other_backends_do_not_count():
    """Only the layers that the backend serves must agree: it does not serve windows, and encoders cache nothing."""
    without_windows = tuple(feature for feature in FEATURES if feature != "window")
    cap = replace(FULL, logits_soft_cap=3.0)
    with registered(one_set(features=without_windows)):
        check_one_set_of_parameters(GEMMA, **CALL)
        (reason,) = refused(GEMMA | {"cap": cap})
        assert "of 'layers.1' in all layers, got 3.0 at 'cap'" in reason
        encoder = replace(cap, attention_type=AttentionType.ENCODER)
        check_one_set_of_parameters({"encoder": encoder, "decoder": FULL}, **CALL)
    with registered(one_set(dtypes=(torch.float32,))):
        check_one_set_of_parameters(GEMMA, **CALL | dict(dtype=torch.bfloat16))
        check_one_set_of_parameters(GEMMA, **CALL | dict(device="meta"))  # no backend can serve this device


def test_formats_and_query_scales_of_layers():
    """The cache format and the query scale of a layer decide which backend serves it."""
    layers = {"a": fast.GQAAttention(FULL), "b": fast.GQAAttention(FULL, FP8_E4M3, q_scale=0.5)}
    with registered(one_set()):
        (reason,) = refused(layers)
        assert reason.endswith("expected cache_format compute_dtype of 'a' in all layers, got fp8_e4m3 at 'b'")
    with registered(one_set(cache_formats=(COMPUTE_FORMAT.name,))):
        check_one_set_of_parameters(layers, **CALL)
    with registered(one_set(fp8_modes=("converted",))):
        check_one_set_of_parameters(layers, **CALL)
        layers["b"] = fast.GQAAttention(FULL, FP8_E4M3)
        assert len(refused(layers)) == 1


def test_latent_attention():
    """Layers of latent attention are checked in the same way."""
    support = OpSupport(print, one_set_of_parameters=True)
    with registered(Backend("global", 50, "cpu", {"flash_attn_varlen": support})):
        check_one_set_of_parameters({"a": DIRECT, "b": DIRECT}, **CALL)
        (reason,) = refused({"a": DIRECT, "b": LOW_RANK})
    assert reason.startswith(
        "global: holds one set of parameters for flash_attn_varlen of all layers; layers: expected "
    )
    assert "'a'" in reason and reason.endswith("at 'b'")


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (dict(layers=[FULL]), TypeError, "layers: expected a Mapping, got list"),
        (dict(layers={}), ValueError, "layers: expected at least one layer, got none"),
        (dict(layers={"a": 3}), ValueError,
         "layers: expected an MLAConfig or GQAConfig, or a layer with a config, at 'a', got int"),
        (dict(device=3), TypeError, "device: expected a torch.device or its name, got int"),
        (dict(dtype="float32"), TypeError, "dtype: expected a dtype, got str"),
        (dict(block_size=0), ValueError, "block_size: expected a positive int, got 0"),
        (dict(backend=3), ValueError, "backend: expected None, a name or a mapping from op to name, got int"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_bad_arguments(changed, error, message, plain_errors):
    with pytest.raises(error) as got:
        check_one_set_of_parameters(**dict(layers=GEMMA, **CALL) | changed)
    assert str(got.value) == message


def test_the_declaration_is_a_flag(plain_errors):
    with pytest.raises(TypeError, match="^one_set_of_parameters: expected True or False, got int$"):
        OpSupport(print, one_set_of_parameters=1)
    assert not any(support.one_set_of_parameters for backend in fast.backends.registered()
                   for support in backend.ops.values())  # fmt: skip


# Models of transformers.


def test_models(plain_errors):
    """`use_attention` refuses a Gemma whose layers such a backend would serve, and leaves the model as it was."""
    gqa_models = pytest.importorskip("tests.support.gqa_models", reason="the integration runs transformers models")
    from fast.integrations.transformers import use_attention

    wanted = ("global: holds one set of parameters for gqa_paged_attention of all layers; layers: expected "
              "sliding_window 7 of 'layers.0.self_attn' in all layers, got None at 'layers.1.self_attn'")  # fmt: skip
    with registered(one_set()):
        model = gqa_models.build("gemma2")
        before = gqa_models.attributes(model)
        for options in ({}, {"backend": "global"}):
            with pytest.raises(UnsupportedConfiguration) as error:
                use_attention(model, fast, **options)
            assert error.value.reasons == (wanted,)
        assert gqa_models.attributes(model) == before
        use_attention(model, reference)  # `reference` has no backends
        use_attention(gqa_models.build("gemma2"), fast, backend="cpu")
        uniform = use_attention(gqa_models.build("mistral"), fast, backend="global")
        tokens = gqa_models.tokens_of(uniform, "mistral", **gqa_models.inputs_of("mistral"), **gqa_models.GREEDY)
    assert torch.equal(tokens, gqa_models.stock_tokens("mistral"))


def test_models_that_move(monkeypatch, plain_errors):
    """The layers are checked again when the first plan is for another device; each device is checked once."""
    pytest.importorskip("transformers", reason="the integration runs transformers models")
    from fast.integrations.transformers.gqa import steps

    calls = []
    monkeypatch.setattr(steps, "check_one_set_of_parameters", lambda *args: calls.append(args))
    ops = SimpleNamespace(build_gqa_metadata=lambda *args, **kwargs: args[2])
    options = steps.Options(ops, 16, COMPUTE_FORMAT, {FULL: ("a",)}, {"backend": None}, {"a": FULL}, torch.float32)
    for device in ("cpu", "meta", "cpu", "meta"):
        batch = SimpleNamespace(query_start_loc=torch.zeros(2, device=device))
        assert options.plan(batch) == {"a": FULL}
    assert [args[1].type for args in calls] == ["cpu", "meta"] and calls[0][0] == {"a": FULL}
    assert calls[0][2:] == (torch.float32, 16, None)


def test_serving_loops(plain_errors):
    """The serving loop of the main job checks its layers before it allocates."""
    gqa_models = pytest.importorskip("tests.support.gqa_models", reason="the integration runs transformers models")
    from fast.demo.gqa.serving import GQAServingLoop
    from fast.integrations.transformers import gqa_layers

    allocated = []
    ops = SimpleNamespace(**{name: getattr(fast, name) for name in fast.__all__})
    ops.allocate_key_value_cache = lambda *args, **kwargs: allocated.append(args)
    model = gqa_models.served("gemma2", fast)
    sizes = dict(num_blocks=4, block_size=16, max_num_seqs=2, token_budget=8)
    with registered(one_set()):
        with pytest.raises(UnsupportedConfiguration, match="^global: holds one set of parameters for gqa_paged_att"):
            GQAServingLoop(model, gqa_layers(model), ops, **sizes, planning={"backend": None})
        assert not allocated
        GQAServingLoop(model, gqa_layers(model), fast, **sizes, planning={"backend": "cpu"})
        GQAServingLoop(model, gqa_layers(model), fast, **sizes)
