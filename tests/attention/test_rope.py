"""Tests of the rotary embedding (rope): comparisons with complex numbers and transformers, properties of rotations.

"Pitfall 15" is entry 15 of the list in `tests/__init__.py`. The budget of a result is the largest error that
docs/correctness.md allows. `compare` measures errors against the float64 result (gold), and computes the budget.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import fast
import reference
from fast.parity import compare
from reference.interfaces import MLAConfig, RopeConfig, YarnConfig

from ..support.factories import CONFIGS, DIRECT, LOW_RANK, YARN, assert_close64, oracle_rope
from ..support.properties import given, st

DEEPSEEK_YARN = YarnConfig(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
ROPES = {
    "default": RopeConfig(),
    "half-split": RopeConfig(theta=1e6, interleaved=False),
    "deepseek": RopeConfig(yarn=DEEPSEEK_YARN),
    "one mscale": RopeConfig(interleaved=False, yarn=replace(DEEPSEEK_YARN, mscale=0.5, mscale_all_dim=None)),
    "no mscale": RopeConfig(yarn=replace(DEEPSEEK_YARN, mscale=None, mscale_all_dim=None)),
    "unequal": RopeConfig(yarn=replace(DEEPSEEK_YARN, mscale=1.0, mscale_all_dim=0.5)),
    "short": RopeConfig(theta=5000.0, yarn=YARN),
}


def draw(tokens: int, heads: int, width: int, dtype=torch.float64):
    positions = torch.randint(0, 100_000, (tokens,))
    return positions, torch.randn(tokens, heads, width).to(dtype), torch.randn(tokens, width).to(dtype)


def check_rope(ops, rope: RopeConfig):
    """Assert that rope rotates the config's pairs (interleaved or half-split) by position x frequency (pitfall 15)."""
    config = replace(DIRECT, qk_rope_head_dim=32, rope=rope)
    positions, q_pe, k_pe = draw(7, 3, 32)
    positions = positions % 2000  # small positions, so that an angle in float64 has 12 correct digits
    q_out, k_out = ops.apply_rope(positions, q_pe, k_pe, rope)
    assert_close64(q_out, oracle_rope(q_pe, positions, config))
    assert_close64(k_out, oracle_rope(k_pe, positions, config))


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_against_complex_numbers(ops, rope):
    """Rope is the multiplication of each pair by a complex number (pitfall 15)."""
    check_rope(ops, rope)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_yarn_against_transformers(ops, rope):
    """With YaRN, frequencies and magnitude of cos and sin equal the values of transformers (pitfall 14)."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if rope.yarn is None:
        frequencies = ops.rotary_frequencies(rope, 64, torch.float64)
        wanted = torch.tensor([rope.theta ** -(2 * i / 64) for i in range(32)], dtype=torch.float64, device="cpu")
        assert_close64(frequencies, wanted)
        return
    y = rope.yarn
    parameters = dict(
        rope_type="yarn",
        rope_theta=rope.theta,
        factor=y.factor,
        beta_fast=y.beta_fast,
        beta_slow=y.beta_slow,
        original_max_position_embeddings=y.original_max_position_embeddings,
    )
    parameters |= {k: v for k, v in (("mscale", y.mscale), ("mscale_all_dim", y.mscale_all_dim)) if v is not None}
    config = transformers.DeepseekV3Config(
        qk_rope_head_dim=64, rope_parameters=parameters, max_position_embeddings=int(4096 * y.factor)
    )
    wanted, magnitude = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    frequencies = ops.rotary_frequencies(rope, 64, torch.float32)
    gold = ops.rotary_frequencies(rope, 64, torch.float64)
    assert compare("frequencies", frequencies, wanted, gold).passed
    assert y.cos_sin_scale == pytest.approx(magnitude, rel=1e-12)
    cos, sin = ops.rotary_cos_sin(torch.arange(5), rope, 64, torch.float64)
    assert_close64(cos.square() + sin.square(), torch.full((5, 32), magnitude**2, dtype=torch.float64))


YARN_GRID = [
    (dim, theta, original, betas)
    for dim in (8, 32, 64)
    for theta in (100.0, 10_000.0, 1e6)
    for original in (64, 4096, 65_536, 1_000_000)
    for betas in ((32.0, 1.0), (1.0, 1.0), (64.0, 8.0), (4.0, 0.25))
]


def deepseek_frequencies(dim: int, theta: float, original: int, betas: tuple[float, float], factor: float):
    """Return DeepSeek's YaRN frequencies, and the index at which YaRN's ramp (a range of pairs) ends.

    Pairs before the ramp keep their frequency, and YaRN divides the frequency of pairs behind the ramp by `factor`.
    Pairs in the ramp get a frequency between the kept and the divided frequency. The ramp can end behind the last pair.

    The computation follows `find_correction_range` and `linear_ramp_mask` of DeepSeek's code, in Python floats.
    """
    fast_pair, slow_pair = (dim * math.log(original / (b * 2 * math.pi)) / (2 * math.log(theta)) for b in betas)
    first, last = max(math.floor(fast_pair), 0), min(math.ceil(slow_pair), dim - 1)
    width = last - first if last != first else 0.001
    frequencies = []
    for pair in range(dim // 2):
        trained = 1.0 / theta ** (2 * pair / dim)
        kept = 1.0 - min(max((pair - first) / width, 0.0), 1.0)
        frequencies.append(trained / factor * (1.0 - kept) + trained * kept)
    return torch.tensor(frequencies, dtype=torch.float64, device="cpu"), last


def test_yarn_ramp_against_deepseek(ops):
    """The frequencies equal the frequencies of DeepSeek's code, wherever YaRN's ramp ends (`deepseek_frequencies`).

    The ramp can end behind the last pair: the last pair has the index dim // 2 - 1, and the largest possible end of the
    ramp is dim - 1.
    """
    ends = set()
    for dim, theta, original, betas in YARN_GRID:
        wanted, last = deepseek_frequencies(dim, theta, original, betas, 40.0)
        ends.add("inside" if last < dim // 2 else "behind the pairs" if last < dim - 1 else "at dim - 1")
        found = ops.rotary_frequencies(RopeConfig(theta, yarn=YarnConfig(40.0, original, *betas)), dim, torch.float64)
        assert_close64(found / wanted, torch.ones_like(wanted))
    assert ends == {"inside", "behind the pairs", "at dim - 1"}


def test_yarn_ramp_against_transformers(ops):
    """For YARN_GRID, errors of frequencies are within a budget that is computed from the errors of transformers."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for dim, theta, original, betas in YARN_GRID:
        parameters = dict(rope_type="yarn", rope_theta=theta, factor=40.0, original_max_position_embeddings=original,
                          beta_fast=betas[0], beta_slow=betas[1])  # fmt: skip
        config = transformers.DeepseekV3Config(
            qk_rope_head_dim=dim, rope_parameters=parameters, max_position_embeddings=original * 40
        )
        theirs, _ = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
        gold, _ = deepseek_frequencies(dim, theta, original, betas, 40.0)
        rope = RopeConfig(theta, yarn=YarnConfig(40.0, original, *betas))
        ours = ops.rotary_frequencies(rope, dim, torch.float32)
        # compare the ratios frequency / gold, so that low frequencies count as much as high frequencies
        ratios = (ours.double() / gold).float(), (theirs.double() / gold).float(), torch.ones_like(gold)
        parity = compare(f"frequencies of {dim, theta, original, betas}", *ratios)
        assert parity.passed, parity


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 1500), st.sampled_from(sorted(ROPES)))
def test_scores_depend_on_distance(first, second, shift, name):
    rope = ROPES[name]
    q, k = torch.randn(1, 1, 16, dtype=torch.float64), torch.randn(1, 16, dtype=torch.float64)

    def score(at, other):
        turned_q, _ = reference.apply_rope(torch.tensor([at]), q, k, rope)
        _, turned_k = reference.apply_rope(torch.tensor([other]), q, k, rope)
        return (turned_q[0, 0] * turned_k[0]).sum()

    assert_close64(score(first, second), score(first + shift, second + shift))


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_norm_is_kept(ops, rope):
    """Rope changes the norm of a vector only by YaRN's magnitude (1 without YaRN); at position 0 it rotates no pair."""
    positions, q_pe, k_pe = draw(9, 2, 16)
    q_out, _k_out = ops.apply_rope(positions, q_pe, k_pe, rope)
    magnitude = 1.0 if rope.yarn is None else rope.yarn.cos_sin_scale
    assert_close64(q_out.norm(dim=-1), q_pe.norm(dim=-1) * magnitude)
    still, _ = ops.apply_rope(torch.zeros_like(positions), q_pe, k_pe, rope)
    assert_close64(still, q_pe * magnitude)


def test_pairings_differ_by_a_permutation(ops):
    """Half-split rope equals three steps: a shuffle, interleaved rope, and the inverse shuffle (pitfall 15).

    Without the shuffle the two kinds of rope give different results.
    """
    positions, q_pe, k_pe = draw(5, 2, 16)
    half, pairs = RopeConfig(interleaved=False), RopeConfig(interleaved=True)
    shuffle = torch.arange(16).view(2, 8).T.flatten()  # 0, 8, 1, 9, ..
    shuffled, _ = ops.apply_rope(positions, q_pe[..., shuffle], k_pe[..., shuffle], pairs)
    split, _ = ops.apply_rope(positions, q_pe, k_pe, half)
    assert_close64(shuffled[..., shuffle.argsort()], split)
    interleaved, _ = ops.apply_rope(positions, q_pe, k_pe, pairs)
    assert (interleaved - split).abs().max() > 0.1


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_inputs_are_not_written(ops, config: MLAConfig):
    positions, q_pe, k_pe = draw(4, config.num_heads, config.qk_rope_head_dim)
    before = q_pe.clone(), k_pe.clone()
    q_out, k_out = ops.apply_rope(positions, q_pe, k_pe, config.rope)
    assert torch.equal(q_pe, before[0]) and torch.equal(k_pe, before[1])
    assert q_out.shape == q_pe.shape and k_out.shape == k_pe.shape


def test_no_tokens(ops):
    q_out, k_out = ops.apply_rope(torch.arange(0), torch.zeros(0, 3, 8), torch.zeros(0, 8), LOW_RANK.rope)
    assert q_out.shape == (0, 3, 8) and k_out.shape == (0, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_parity(rope, dtype):
    """The error of rope in `fast` is within the budget for strided inputs, such as slices of a layer's projections."""
    positions, q_pe, k_pe = draw(40, 3, 24, dtype)
    q_pe, k_pe = q_pe[..., 8:], k_pe[..., 8:]
    gold = reference.apply_rope(positions, q_pe.double(), k_pe.double(), rope)
    low = reference.apply_rope(positions, q_pe, k_pe, rope)
    for name, value, low_half, gold_half in zip(
        "qk", fast.apply_rope(positions, q_pe, k_pe, rope), low, gold, strict=True
    ):
        assert value.dtype == dtype
        parity = compare(f"{name}_pe", value, low_half, gold_half)
        assert parity.passed, parity


def test_rotate_is_apply_rope(ops):
    positions, q_pe, k_pe = draw(6, 2, 8, torch.float32)
    cos, sin = ops.rotary_cos_sin(positions, LOW_RANK.rope, 8, torch.float32)
    q_out, k_out = ops.apply_rope(positions, q_pe, k_pe, LOW_RANK.rope)
    wide = ops.rotary_cos_sin(positions, LOW_RANK.rope, 8, torch.float64)
    for x, out in ((q_pe, q_out), (k_pe, k_out)):
        rotated, gold = (reference.rotate(x.to(c.dtype), c, s, True) for c, s in ((cos, sin), wide))
        assert compare("rotate", ops.rotate(x, cos, sin, LOW_RANK.rope.interleaved), rotated, gold).passed
        assert compare("apply_rope", out, rotated, gold).passed
