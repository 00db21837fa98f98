"""Tests of the option `expand_by_module` of a layer: prefills expand latents by calling `kv_b_proj` itself.

Without the option, prefills multiply by the *dense copy*: the weight of `kv_b_proj`, which the layer recovers from the
module and keeps in the dtype of the layer. The oracle is a float64 product with the dequantised weight of the module.
"""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import fast
import reference
from fast.mla.module_expansion import expand_kv_by_module as fast_expansion
from fast.parity import compare
from reference.interfaces import CommonAttentionMetadata
from reference.mla.module_expansion import expand_kv_by_module as reference_expansion

from ..support import commands
from ..support.factories import CONFIGS, assert_close64, assert_same_bits, linear, make_weights, norm
from ..support.ranks import RANK_CONFIG, STEPS, Steps, serve

EXPANSIONS = {"reference": reference_expansion, "fast": fast_expansion}


class WeightOnly(nn.Module):
    """A linear module that stores its weight in e4m3 with a scale for each row, and counts its calls."""

    def __init__(self, weight, pairs=False):
        super().__init__()
        scale = weight.abs().amax(1, keepdim=True) / 448
        self.register_buffer("rows", (weight / scale).to(torch.float8_e4m3fn))
        self.register_buffer("scale", scale.float())
        self.calls, self.pairs = [], pairs

    @property
    def dense(self):
        """The float64 numbers that the stored weight stands for."""
        return self.rows.double() * self.scale.double()

    def forward(self, x):
        self.calls.append(len(x))
        product = nn.functional.linear(x, (self.rows.float() * self.scale).to(x.dtype))
        return (product, None) if self.pairs else product


class Rounding(WeightOnly):
    """A linear module that also rounds its inputs to e4m3, with one scale for each row of inputs."""

    def forward(self, x):
        self.calls.append(len(x))
        scale = x.float().abs().amax(1, keepdim=True).clamp(min=1e-10) / 448
        stored = (x.float() / scale).to(torch.float8_e4m3fn).float()
        return (stored @ self.rows.float().T * scale * self.scale.T).to(x.dtype)


class Uncounted(Rounding):
    """The same module without the count of its calls, which a compiled function could not keep."""

    def forward(self, x):
        scale = x.abs().amax(1, keepdim=True).clamp(min=1e-10) / 448
        return (x / scale).to(torch.float8_e4m3fn).float() @ self.rows.float().T * scale * self.scale.T


class Fixed(nn.Module):
    """A module whose output does not depend on its input."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, x):
        return self.output


def make_layer(ops, config, dtype, kind=WeightOnly, **options):
    """Return a layer whose `kv_b_proj` is a quantised module; every call draws the same random weights."""
    torch.manual_seed(4)
    weights = {name: w.to(dtype) for name, w in make_weights(config, torch.float64).items()}
    modules = {name: linear(w) if w.dim() == 2 else norm(w) for name, w in weights.items()}
    modules["kv_b_proj"] = kind(weights["kv_b_proj"])
    return ops.MLAAttention(config, **modules, **options)


def run(ops, layer, dtype, whole=True):
    """Return the output of a step: a decode, and a prompt of 6 tokens behind 9 tokens of context in several chunks.

    Args:
        whole: whether the step goes through `forward`; otherwise `forward_attention` gets random inputs.
    """
    torch.manual_seed(5)
    c = layer.config
    table = torch.tensor([[0, 1, 9, 9], [2, 3, 4, 5]], dtype=torch.int32)
    common = CommonAttentionMetadata.from_lens([1, 6], [7, 15], table, 4)
    plan = ops.build_mla_metadata(common, 4, 8)
    assert plan.num_decode_tokens == 1 and len(plan.prefill.context_chunks) == 2
    positions, cache = torch.tensor([6, *range(9, 15)]), torch.randn(10, 4, c.head_size).to(dtype)
    if whole:
        return layer(torch.randn(7, c.hidden_size).to(dtype), positions, cache, plan)
    q, latents, k_pe = (torch.randn(7, *s).to(dtype) for s in
                        ((c.num_heads, c.qk_head_dim), (c.kv_lora_rank,), (c.qk_rope_head_dim,)))  # fmt: skip
    output = torch.full((7, c.num_heads, c.v_head_dim), torch.nan, dtype=dtype)
    layer.forward_attention(q, latents, k_pe, cache, plan, output)
    return output


@pytest.mark.parametrize("package", EXPANSIONS)
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 37])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_expansion(package, pairs, tokens, dtype):
    """Expand by the module -> keys and values within the budget of `expand_kv` with the module's weight."""
    c = CONFIGS["low-rank"]
    module = WeightOnly(make_weights(c, torch.float32)["kv_b_proj"].to(dtype), pairs)
    latents = torch.randn(tokens, c.kv_lora_rank).to(dtype)
    dims = c.num_heads, c.qk_nope_head_dim, c.v_head_dim
    found = EXPANSIONS[package](latents, module, *dims)
    gold = reference.expand_kv(latents.double(), *reference.split_kv_b_proj(module.dense, *dims))
    # gold multiplies by the exact weight; a dense copy and the module's own product round the weight to the dtype
    dense = reference.dense_weight(module, c.kv_lora_rank, dtype)
    low = reference.expand_kv(latents, *reference.split_kv_b_proj(dense, *dims))
    for name, *three in zip(("k_nope", "v"), found, low, gold, strict=True):
        assert three[0].dtype == dtype and three[0].shape == three[2].shape
        parity = compare(name, *three)
        assert parity.passed, parity


@pytest.mark.parametrize("package", EXPANSIONS)
def test_expansion_rounds_as_the_module_does(package):
    """Expand by a module that rounds its inputs to e4m3 -> keys and values with the bits of the module's product."""
    c = CONFIGS["direct"]
    module = Rounding(make_weights(c, torch.float32)["kv_b_proj"])
    latents = torch.randn(9, c.kv_lora_rank)
    k_nope, v = EXPANSIONS[package](latents, module, c.num_heads, c.qk_nope_head_dim, c.v_head_dim)
    assert_same_bits(torch.cat((k_nope, v), -1).flatten(1), module(latents))
    exact = latents.double() @ module.dense.T
    error = (torch.cat((k_nope, v), -1).flatten(1) - exact).norm() / exact.norm()
    assert 1e-3 < error < 2**-4  # e4m3 rounds a normal number by at most 1 / 16


@pytest.mark.parametrize("package", EXPANSIONS)
def test_expansion_refuses(package, plain_errors):
    expand, latents = EXPANSIONS[package], torch.randn(4, 5)
    with pytest.raises(ValueError, match=r"^kv_b_proj\(kv_c_normed\): expected shape \[4, 66\], got \[4, 12\]$"):
        expand(latents, linear(torch.randn(12, 5)), 3, 12, 10)
    with pytest.raises(ValueError, match=r"^kv_b_proj\(kv_c_normed\): expected dtype torch.float32, got .*float64$"):
        expand(latents, Fixed(torch.zeros(4, 66, dtype=torch.float64)), 3, 12, 10)
    with pytest.raises(ValueError, match="^kv_b_proj: expected no bias, got a bias beside the product$"):
        expand(latents, Fixed((torch.zeros(4, 66), torch.zeros(66))), 3, 12, 10)
    with pytest.raises(ValueError, match="^kv_c_normed: expected device cpu, got meta$"):
        expand(latents.to("meta"), linear(torch.randn(66, 5)), 3, 12, 10)
    with pytest.raises(TypeError, match="^kv_b_proj: expected a module, got function$"):
        expand(latents, lambda x: x, 3, 12, 10)


@pytest.mark.parametrize("whole", [True, False], ids=["forward", "forward_attention"])
@pytest.mark.parametrize("fp8_weights", [False, True])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_layer(ops, config, fp8_weights, whole):
    """A layer that expands by its module has the outputs of a layer with the dense copy; only rounding differs.

    The module is called for the new tokens of the prompt and for each chunk of its context. `fast` makes no
    other call. If the layer keeps no dense copy, `reference` also calls the module in every step to recover the weight.
    """
    options = dict(fp8_weights=fp8_weights)
    dense, own = (make_layer(ops, config, torch.float64, expand_by_module=each, **options) for each in (False, True))
    own.kv_b_proj.calls.clear()
    found = run(ops, own, torch.float64, whole)
    recovered = [1, config.kv_lora_rank] if ops is reference and fp8_weights else []
    assert own.kv_b_proj.calls == [*recovered, 6, 8, 1]
    dense.kv_b_proj.calls.clear()
    wanted = run(ops, dense, torch.float64, whole)
    assert dense.kv_b_proj.calls == []
    assert (found - wanted).abs().max() <= 1e-12 * wanted.abs().max() and wanted.abs().max() > 0.01
    assert_same_bits(run(ops, own, torch.float64, whole), found)  # a repeated call skips checks


@pytest.mark.parametrize("kind", [WeightOnly, Rounding])
def test_packages_agree(kind):
    """The outputs of both packages agree, also if the module rounds its inputs, because both call the module."""
    config = CONFIGS["low-rank"]
    options = dict(kind=kind, expand_by_module=True)
    low, found = (run(ops, make_layer(ops, config, torch.float32, **options), torch.float32, False)
                  for ops in (reference, fast))  # fmt: skip
    assert (found - low).abs().max() <= torch.finfo(torch.float32).eps ** 0.5 * low.abs().max()
    plain = run(fast, make_layer(fast, config, torch.float32, kind), torch.float32, False)
    rounds = (plain - found).abs().max() > 1e-3 * found.abs().max()
    assert rounds == (kind is Rounding)  # the rounding of inputs shows that the layer called the module


def test_dense_copy_only_where_it_is_read(ops):
    """A layer keeps a dense copy only for decodes without `fp8_weights` and for prefills that multiply by the copy."""
    config = CONFIGS["direct"]
    for by_module in (False, True):
        for fp8_weights in (False, True):
            layer = make_layer(ops, config, torch.float32, expand_by_module=by_module, fp8_weights=fp8_weights)
            kept = not (by_module and fp8_weights)
            assert (layer.recovered_kv_b_weight is not None) == kept
            run(ops, layer, torch.float32)
            rows = config.num_heads * (config.qk_nope_head_dim + config.v_head_dim) * config.kv_lora_rank
            held = {t.untyped_storage().data_ptr(): t for t in (*layer.parameters(), *layer.buffers())}
            wide = [t for t in held.values() if t.numel() == rows and t.dtype == torch.float32]
            assert len(wide) == kept
            dense = torch.cat([w.permute(1, 2, 0) for w in layer.up_projections()], 1).flatten(0, 1)
            assert_same_bits(dense, layer.kv_b_proj.rows.float() * layer.kv_b_proj.scale)


def test_refresh(ops):
    """Change the module of a layer without a dense copy -> prefills change at once, decodes after `refresh_weights`."""
    config = CONFIGS["direct"]
    layer = make_layer(ops, config, torch.float32, expand_by_module=True, fp8_weights=True)
    before = run(ops, layer, torch.float32, False)
    layer.kv_b_proj.scale.mul_(2)
    between = run(ops, layer, torch.float32, False)
    assert_same_bits(between[0], before[0])  # the decode
    assert (between[1:] - before[1:]).abs().max() > 0.1 * before.abs().max()
    layer.refresh_weights()
    after = run(ops, layer, torch.float32, False)
    assert_same_bits(after[1:], between[1:])
    assert (after[0] - before[0]).abs().max() > 0.1 * before[0].abs().max()
    layer.kv_b_proj = WeightOnly(torch.randn_like(layer.kv_b_proj.scale.expand(-1, config.kv_lora_rank)))
    replaced = run(ops, layer, torch.float32, False)
    assert (replaced[1:] - after[1:]).abs().max() > 0.1 * after.abs().max() and layer.kv_b_proj.calls


def test_a_plain_linear(ops):
    """A plain linear module is called too; the layer reads the parameter of the module and keeps no copy."""
    config = CONFIGS["direct"]
    weights = make_weights(config, torch.float64)
    outputs = []
    for by_module in (False, True):
        modules = {name: linear(w) if w.dim() == 2 else norm(w) for name, w in weights.items()}
        layer = ops.MLAAttention(config, **modules, expand_by_module=by_module, fp8_weights=True)
        assert layer.recovered_kv_b_weight is None
        outputs.append(run(ops, layer, torch.float64))
    assert (outputs[1] - outputs[0]).abs().max() <= 1e-12 * outputs[0].abs().max()


@pytest.mark.parametrize("size, merge", [(2, "a2a"), (4, "ag_rs")])
def test_several_ranks(ops, size, merge):
    """Each rank calls the module of its heads for gathered context -> the output of one rank with the dense weight."""
    steps = Steps(STEPS, 16, 64, 3)
    wanted = serve(ops, RANK_CONFIG, steps)

    def program(ranks):
        return serve(ops, RANK_CONFIG, steps, context_parallel=ranks, expand_by_module=True)

    for outputs in ops.simulate(size, 4, program, merge=merge):
        for found, expected in zip(outputs, wanted, strict=True):
            assert_close64(found, expected)


COMPILE = """
import torch
import fast
from tests.mla.test_module_expansion import CONFIGS, Uncounted, make_layer, run

layer = make_layer(fast, CONFIGS["low-rank"], torch.float32, Uncounted, expand_by_module=True)
wanted = run(fast, layer, torch.float32)
compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
compiled.config = layer.config
with torch.no_grad():
    assert torch.equal(run(fast, compiled, torch.float32), wanted) and wanted.isfinite().all()
"""


def test_compiled():
    """`torch.compile` traces a layer with `expand_by_module` in one graph -> the bits of eager mode.

    The test runs in a process without the run-time shape checks of the tests, which `torch.compile` cannot trace.
    """
    code, said = commands.run([sys.executable, "-c", COMPILE], 300)
    assert code == 0, said


def test_memory_profile(ops):
    """The memory-profile run calls the module for the largest chunk, so its peak includes the memory of this call."""
    config = CONFIGS["direct"]
    layer = make_layer(ops, config, torch.float32, expand_by_module=True, fp8_weights=True, workspace_tokens=40)
    layer.kv_b_proj.calls.clear()
    cache = torch.randn(10, 4, config.head_size)
    layer(torch.randn(7, config.hidden_size), torch.arange(7), cache, None)
    assert 40 in layer.kv_b_proj.calls


def test_forward_prefill_refuses(ops, plain_errors):
    """`forward_prefill` refuses an `expand` that is no function, and results of a wrong shape."""
    config = CONFIGS["direct"]
    layer = make_layer(ops, config, torch.float32)
    w_uk, w_uv = layer.up_projections()
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    plan = ops.build_mla_metadata(CommonAttentionMetadata.from_lens([6], [6], table, 4), 4, 64).prefill
    q, latents, k_pe = torch.randn(6, 3, 20), torch.randn(6, 24), torch.randn(6, 8)
    arguments = q, latents, k_pe, torch.randn(2, 4, 32), plan, w_uk, w_uv, 0.3
    with pytest.raises(TypeError, match="^expand: expected a function, got int$"):
        ops.forward_prefill(*arguments, expand=3)
    with pytest.raises(ValueError, match=r"^expand: v: expected shape \[6, 3, 10\], got \[6, 3, 12\]$"):
        ops.forward_prefill(*arguments, expand=lambda x: (x.new_zeros(6, 3, 12), x.new_zeros(6, 3, 12)))
    for result, said in ((lambda x: x, "Tensor"), (lambda x: None, "NoneType")):
        with pytest.raises(TypeError, match=f"^expand: expected a pair of tensors, got {said}$"):
            ops.forward_prefill(*arguments, expand=result)
    with pytest.raises(ValueError, match="^expand: expected a pair of tensors, got 3 elements$"):
        ops.forward_prefill(*arguments, expand=lambda x: (x, x, x))
    with pytest.raises(TypeError, match="^expand_by_module: expected True or False, got str$"):
        make_layer(ops, config, torch.float32, expand_by_module="yes")
