"""Tests of the weights of a layer: W_UK and W_UV of `kv_b_proj`, and the weight of any linear module.

W_UK turns a latent into the keys of all heads, and W_UV turns a latent into the values of all heads. If a module keeps
its weight in another form, such as int8, the layer recovers the weight from the module's products (`dense_weight`).
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fast
import reference
from fast.parity import compare
from reference.interfaces import CommonAttentionMetadata, linear_output

from ..support.factories import (
    CONFIGS,
    assert_close64,
    assert_same_bits,
    linear,
    make_layer,
    make_up_projections,
    make_weights,
    norm,
)


class Int8Linear(nn.Module):
    """A linear module with an int8 weight, like modules of quantisation libraries."""

    def __init__(self, weight, bias=None):
        super().__init__()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("rows", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = bias

    def forward(self, x):
        out = x @ (self.rows.to(x.dtype) * self.scale.to(x.dtype)).T
        return out if self.bias is None else out + self.bias


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_split_is_what_the_projection_does(ops, config):
    """`split_kv_b_proj` and `absorb` return views of the weight that give the same keys and values as `kv_b_proj`.

    For each head, the weight has P rows for the key, then V rows for the value.
    """
    c = config
    projection = linear(make_weights(c, torch.float64)["kv_b_proj"])
    latent = torch.randn(5, c.kv_lora_rank, dtype=torch.float64)
    per_head = projection(latent).view(5, c.num_heads, c.qk_nope_head_dim + c.v_head_dim)
    w_uk, w_uv = ops.split_kv_b_proj(projection.weight, c.num_heads, c.qk_nope_head_dim, c.v_head_dim)
    k_nope, v = ops.expand_kv(latent, w_uk, w_uv)
    assert_close64(k_nope, per_head[..., : c.qk_nope_head_dim])
    assert_close64(v, per_head[..., c.qk_nope_head_dim :])
    storage = projection.weight.untyped_storage().data_ptr()
    for view in (w_uk, w_uv, *ops.absorb(w_uk, w_uv)):
        assert view.untyped_storage().data_ptr() == storage, "expected a view of the weight, got a copy"


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_absorption_moves_the_product(ops, config):
    """Absorbed weights give the same results: for a latent c and a query q, (W_UK c) . q = c . (W_UK^T q).

    In the same way, W_UV can be applied after the weighted sum over the latents.
    """
    w_uk, w_uv = make_up_projections(config, torch.float64)
    w_uk_t, w_uv_absorbed = ops.absorb(w_uk, w_uv)
    assert w_uk_t.shape == (config.num_heads, config.qk_nope_head_dim, config.kv_lora_rank)
    q = torch.randn(6, config.num_heads, config.qk_nope_head_dim, dtype=torch.float64)
    latent = torch.randn(4, config.kv_lora_rank, dtype=torch.float64)
    k_nope, v = ops.expand_kv(latent, w_uk, w_uv)
    expanded = (q[:, None] * k_nope[None]).sum(-1)
    absorbed = (ops.query_to_latent(q, w_uk_t)[:, None] * latent[None, :, None]).sum(-1)
    assert_close64(absorbed, expanded)
    weights = torch.rand(3, 4, dtype=torch.float64)
    mixed = (weights @ latent)[:, None].expand(-1, config.num_heads, -1)
    assert_close64(ops.latent_to_value(mixed, w_uv_absorbed), torch.einsum("ts,snv->tnv", weights, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_parity(dtype, tokens):
    config = CONFIGS["low-rank"]
    w_uk, w_uv = make_up_projections(config, dtype)
    inputs = [torch.randn(tokens, config.num_heads, config.qk_nope_head_dim), torch.randn(tokens, config.kv_lora_rank),
              torch.randn(tokens, config.num_heads, config.kv_lora_rank)]  # fmt: skip

    def run(ops, inputs, w_uk, w_uv):
        q_nope, latent, out = inputs
        w_uk_t, w_uv_absorbed = ops.absorb(w_uk, w_uv)
        return [ops.query_to_latent(q_nope, w_uk_t), ops.latent_to_value(out, w_uv_absorbed),
                *ops.expand_kv(latent, w_uk, w_uv)]  # fmt: skip

    inputs = [x.to(dtype) for x in inputs]
    gold = run(reference, [x.double() for x in inputs], w_uk.double(), w_uv.double())
    low, value = run(reference, inputs, w_uk, w_uv), run(fast, inputs, w_uk, w_uv)
    for name, *three in zip(("query_to_latent", "latent_to_value", "k_nope", "v"), value, low, gold, strict=True):
        assert three[0].dtype == dtype
        parity = compare(name, *three)
        assert parity.passed, parity


def test_dense_weight_of_a_plain_linear(ops):
    plain = linear(torch.randn(12, 5))
    weight = ops.dense_weight(plain, 5, torch.float32)
    assert weight.data_ptr() == plain.weight.data_ptr() and not weight.requires_grad


def test_dense_weight_through_the_identity(ops):
    rows = torch.randn(12, 5)
    quantised = Int8Linear(rows)
    weight = ops.dense_weight(quantised, 5, torch.float32)
    assert weight.is_contiguous()
    assert_same_bits(weight, quantised.rows.float() * quantised.scale)
    assert (weight - rows).abs().max() > 0
    other_dtype = ops.dense_weight(nn.Sequential(linear(rows.double())), 5, torch.float64)
    assert_same_bits(other_dtype, rows.double())


def test_dense_weight_refuses(ops, plain_errors):
    with pytest.raises(ValueError, match="^linear: expected no bias, got a bias$"):
        ops.dense_weight(nn.Linear(5, 12), 5, torch.float32)
    with pytest.raises(ValueError, match="^linear: expected no bias, got a bias$"):
        ops.dense_weight(Int8Linear(torch.randn(12, 5), torch.ones(12)), 5, torch.float32)
    with pytest.raises(ValueError, match=r"^kv_b_weight: expected shape \[66, Lkv\], got \[12, 5\]$"):
        ops.split_kv_b_proj(torch.randn(12, 5), 3, 12, 10)


class PairLinear(nn.Module):
    """A linear module that returns (product, bias), as the linear modules of vLLM and Megatron do."""

    def __init__(self, weight, bias=None, skip_bias_add=False):
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), None if bias is None else nn.Parameter(bias)
        self.skip_bias_add = skip_bias_add

    def forward(self, x):
        added = None if self.skip_bias_add else self.bias
        return torch.nn.functional.linear(x, self.weight, added), self.bias if self.skip_bias_add else None


def test_dense_weight_of_a_linear_that_returns_a_pair(ops, plain_errors):
    weight = torch.randn(12, 5)
    assert_same_bits(ops.dense_weight(PairLinear(weight), 5, torch.float32), weight)
    with pytest.raises(ValueError, match="^linear: expected no bias, got a bias beside the product$"):
        ops.dense_weight(PairLinear(weight, torch.ones(12), skip_bias_add=True), 5, torch.float32)
    with pytest.raises(ValueError, match="^linear: expected no bias, got a bias$"):
        ops.dense_weight(PairLinear(weight, torch.ones(12)), 5, torch.float32)


def modules_of(weights, kind):
    return {name: kind(w) if w.dim() == 2 else norm(w) for name, w in weights.items()}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_layer_of_linears_that_return_pairs(ops, config):
    """A layer accepts projections that return (product, None)."""
    weights = make_weights(config, torch.float64)
    plain, pairs = (ops.MLAAttention(config, **modules_of(weights, kind)) for kind in (linear, PairLinear))
    table = torch.tensor([[0, 1], [3, 2]], dtype=torch.int32)
    common = CommonAttentionMetadata.from_lens([1, 6], [3, 6], table, 4)  # a decode with context, a prompt
    metadata = ops.build_mla_metadata(common, 4, 64)
    hidden, positions = torch.randn(7, config.hidden_size, dtype=torch.float64), torch.tensor([2, 0, 1, 2, 3, 4, 5])
    cache = torch.randn(4, 4, config.head_size, dtype=torch.float64)
    outputs = [layer(hidden, positions, cache.clone(), metadata) for layer in (plain, pairs)]
    assert_same_bits(*outputs)
    assert outputs[0].abs().max() > 0.01


@pytest.mark.parametrize("name", ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"])
def test_layer_refuses_a_bias_beside_the_product(ops, name, plain_errors):
    """If a module returns a bias beside the product (`skip_bias_add`), the layer refuses the module."""
    config = CONFIGS["direct" if name == "q_proj" else "low-rank"]
    weights = make_weights(config, torch.float32)
    modules = modules_of(weights, PairLinear)
    modules[name] = PairLinear(weights[name], torch.ones(len(weights[name])), skip_bias_add=True)
    called = {"kv_b_proj": "linear"}.get(name, name)
    got = "a module with skip_bias_add and a bias" if name == "o_proj" else "a bias beside the product"
    with pytest.raises(ValueError, match=f"^{called}: expected .*bias, got {got}$"):
        ops.MLAAttention(config, **modules).project(torch.randn(2, config.hidden_size), torch.arange(2))


@pytest.mark.parametrize("output", [None, (torch.zeros(1),), (torch.zeros(1), None, None), ("product", None)])
def test_linear_output_refuses(output, plain_errors):
    with pytest.raises((TypeError, ValueError), match=r"^o_proj: expected a tensor or \(product, bias\), got "):
        linear_output("o_proj", output)


def test_refresh_in_place(ops):
    """`refresh_weights` writes a recovered weight into the same memory as before, because captured graphs read it.

    If `kv_b_proj` is a plain linear module, the layer reads the parameter itself and recovers nothing.
    """
    config = CONFIGS["direct"]
    weights = make_weights(config, torch.float32)
    layer = make_layer(ops, config, weights, torch.float32)
    assert layer.recovered_kv_b_weight is None
    with torch.no_grad():
        layer.kv_b_proj.weight.mul_(2)
    w_uk, _ = layer.up_projections()
    doubled, _ = ops.split_kv_b_proj(2 * weights["kv_b_proj"], 3, 12, 10)
    assert_same_bits(w_uk, doubled)

    modules = {name: linear(w) if w.dim() == 2 else norm(w) for name, w in weights.items()}
    layer = ops.MLAAttention(config, **(modules | {"kv_b_proj": Int8Linear(weights["kv_b_proj"])}))
    held = layer.recovered_kv_b_weight
    address = held.data_ptr()
    layer.kv_b_proj.scale.mul_(2)
    before = held.clone()
    layer.refresh_weights()
    assert layer.recovered_kv_b_weight.data_ptr() == address
    assert_same_bits(held, 2 * before)

    modules["kv_b_proj"] = Int8Linear(weights["kv_b_proj"])
    with torch.inference_mode():
        layer = ops.MLAAttention(config, **modules)
    layer.refresh_weights()  # outside of the inference mode in which the layer was made
    assert_same_bits(layer.recovered_kv_b_weight, before)


class Doubling(torch.Tensor):
    """A tensor subclass whose products use twice its data; like a quantised weight, it reports an ordinary dtype."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        plain = [arg.as_subclass(torch.Tensor) * 2 if isinstance(arg, cls) else arg for arg in args]
        return function(*plain, **(kwargs or {}))


def doubled(w):
    module = linear(w)
    del module.weight
    module.weight = w.as_subclass(Doubling)
    return module


def hooked(w):
    module = linear(w)
    module.register_forward_hook(lambda module, inputs, output: 2 * output)
    return module


def replaced(w):
    module = linear(w)
    module.forward = lambda x: 2 * torch.nn.functional.linear(x, w)
    return module


@pytest.mark.parametrize("wrap", [doubled, hooked, replaced])
def test_a_linear_that_is_more_than_its_parameter_is_recovered(ops, wrap, plain_errors):
    """If a linear module does not simply multiply by `.weight`, the layer recovers the weight from the products.

    The cases are a weight of a tensor subclass, a forward hook, and a replaced `forward`.
    """
    weight = torch.randn(10, 6)
    module = wrap(weight)
    assert not ops.is_plain_linear(module, torch.float32)
    assert_same_bits(ops.dense_weight(module, 6, torch.float32), 2 * weight)
    assert ops.is_plain_linear(linear(weight), torch.float32)


def test_layer_reads_norms_that_were_replaced(ops):
    """A layer uses the new weight of a norm after the parameter object was replaced."""
    config = CONFIGS["direct"]
    layer = make_layer(ops, config, make_weights(config, torch.float32), torch.float32)
    hidden, positions = torch.randn(2, config.hidden_size), torch.arange(2)
    before = layer.project(hidden, positions).kv_c_normed
    layer.kv_a_layernorm.weight = nn.Parameter(2 * layer.kv_a_layernorm.weight.detach())
    assert_same_bits(layer.project(hidden, positions).kv_c_normed, 2 * before)


def test_layer_refuses_a_hooked_norm(ops, plain_errors):
    """A layer refuses a norm with a hook, because the layer reads the weight of a norm and never calls the norm."""
    config = CONFIGS["direct"]
    weights = make_weights(config, torch.float32)
    modules = {name: linear(w) if w.dim() == 2 else norm(w) for name, w in weights.items()}
    modules["kv_a_layernorm"].register_forward_hook(lambda module, inputs, output: output)
    wanted = "^kv_a_layernorm: expected a module without hooks, got a module with a forward hook$"
    with pytest.raises(ValueError, match=wanted):
        ops.MLAAttention(config, **modules)
