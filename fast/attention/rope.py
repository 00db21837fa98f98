"""Rotary position embedding of the rope parts of queries and keys (RoFormer, arXiv 2104.09864; YaRN, 2309.00071).

`reference.attention.rope` explains which parts are rotated, and the order of the rotated elements.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from reference.interfaces import (
    E4M3,
    GraphSupport,
    RopeConfig,
    check,
    check_dtype,
    check_flag,
    check_int,
    check_scale,
    check_scale_values,
    check_tensor,
    check_type,
    wide_dtype,
)

from .. import backends
from ..backends import BackendChoice
from ..kernels.rotation import rotate as _rotate_pairs


def rotary_frequencies(rope: RopeConfig, dim: int, dtype: torch.dtype = torch.float32) -> Float[Tensor, " {dim//2}"]:
    """Return the rotary frequencies [R/2], one for each pair of elements.

    At position p, pair i rotates by p times frequency i. Without YaRN, frequency i is theta^(-2i/R). YaRN changes the
    frequencies, so that a model can read longer texts than in its training.
    `reference.attention.rope.rotary_frequencies` has the formula of YaRN.

    Args:
        rope: rotary parameters, such as theta.
        dim: R, the rope dim, an even number.
        dtype: float32 or float64.
    """
    check_type("rope", rope, RopeConfig)
    check_int("dim", dim, 0)
    check(dim % 2 == 0, "dim", "an even number", dim)
    check_dtype("dtype", dtype)
    trained = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=dtype, device="cpu") / dim))
    yarn = rope.yarn
    if yarn is None or dim == 0:
        return trained
    # for each beta: the index (not an integer) of the pair that rotates `beta` times within the training length
    fast, slow = (
        math.log(yarn.original_max_position_embeddings / (beta * 2 * math.pi)) * dim / (2 * math.log(rope.theta))
        for beta in (yarn.beta_fast, yarn.beta_slow)
    )
    low, high = max(math.floor(fast), 0), min(math.ceil(slow), dim - 1)
    ramp = torch.clamp((torch.arange(dim // 2, dtype=dtype, device="cpu") - low) / (high - low or 0.001), 0, 1)
    return torch.lerp(trained, trained / yarn.factor, ramp)


def rotary_cos_sin(
    positions: Int[Tensor, " T"], rope: RopeConfig, dim: int, dtype: torch.dtype
) -> tuple[Float[Tensor, "T {dim//2}"], Float[Tensor, "T {dim//2}"]]:
    """Return the cosine and the sine of every angle of every token; with YaRN, both include the magnitude factor.

    Returns:
        Two [T, R/2] tensors, float64 if `dtype` is float64 and float32 otherwise.

    Raises:
        ValueError: `positions` is not an int32 or int64 tensor [T], or `dim` is odd.
    """
    check_tensor("positions", positions, ("T",), (torch.int64, torch.int32))
    check_dtype("dtype", dtype)
    wide = wide_dtype(dtype)
    angles = positions.to(wide)[:, None] * rotary_frequencies(rope, dim, wide).to(positions.device)
    magnitude = 1.0 if rope.yarn is None else rope.yarn.cos_sin_scale
    return angles.cos() * magnitude, angles.sin() * magnitude


def rotate(
    x: Float[Tensor, "T *heads R"], cos: Float[Tensor, "T R/2"], sin: Float[Tensor, "T R/2"], interleaved: bool
) -> Float[Tensor, "T *heads R"]:
    """Rotate each pair of elements (a, b) to (a cos - b sin, b cos + a sin), computed in the dtype of `cos`.

    Args:
        x: [T, R] or [T, N, R].
        cos: [T, R/2].
        sin: [T, R/2].
        interleaved: if True, pairs are (0, 1), (2, 3), ..; if False, pairs are (0, R/2), (1, R/2 + 1), ..

    Returns:
        The rotated tensor, with the shape, dtype and element order of `x`.

    Raises:
        ValueError: shapes or devices do not match.
    """
    check_type("x", x, Tensor, "a tensor")
    check_flag("interleaved", interleaved)
    check_tensor("x", x, ("T", "R") if x.dim() < 3 else ("T", "N", "R"))
    check_tensor("cos", cos, (x.shape[0], x.shape[-1] // 2), device=x.device)
    check_tensor("sin", sin, tuple(cos.shape), (cos.dtype,), x.device)
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    return _rotate_pairs(x, cos, sin, interleaved)


def apply_rope(
    positions: Int[Tensor, " T"],
    q_pe: Float[Tensor, "T N R"],
    k_pe: Float[Tensor, "T R"],
    rope: RopeConfig,
    q_scale: Float[Tensor, "*heads"] | None = None,
    *,
    frequencies: Float[Tensor, " R/2"] | None = None,
    graph: GraphSupport = GraphSupport.NONE,
    backend: BackendChoice = None,
) -> tuple[Shaped[Tensor, "T N R"], Float[Tensor, "T R"]]:
    """Rotate the rope parts of queries and keys.

    Args:
        positions: [T], position of each token in its request.
        q_pe: [T, N, R], rope part of the queries.
        k_pe: [T, R], rope part of the keys, which all heads share.
        rope: rotary parameters.
        q_scale: float32 scale, [] or [N], with which the rotated `q_pe` is quantised to e4m3 (8 bits); None keeps the
            dtype of `q_pe`.
        frequencies: [R/2], result of `rotary_frequencies`, on the device of `q_pe`: float64 if `q_pe` is float64,
            float32 otherwise. None computes the frequencies in each call.
        graph: kind of the CUDA graph that captures this call; NONE without a graph.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Returns:
        The rotated `q_pe` and `k_pe`, new tensors of the dtype of `q_pe`. If `q_scale` is given, the rotated `q_pe` is
        in e4m3.

    Raises:
        ValueError: shapes, dtypes or devices do not match. For CPU tensors also: the scale is not finite and positive.
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    signature = _ROTATIONS.signature(positions, q_pe, k_pe, rope, q_scale, frequencies, graph, backend)
    chosen = _ROTATIONS.backend_of(signature)
    if chosen is None:
        check_tensor("q_pe", q_pe, ("T", "N", "R"))
        check_tensor("k_pe", k_pe, (q_pe.shape[0], q_pe.shape[2]), (q_pe.dtype,), q_pe.device)
        check_angles(positions, q_pe, rope, frequencies)
        if q_scale is not None:
            check_scale("q_scale", q_scale, q_pe.shape[1], q_pe.device)
        widths = (("qk_rope_head_dim", q_pe.shape[2]),)
        check_type("graph", graph, GraphSupport)
        request = backends.KernelRequest(
            "apply_rope", q_pe.device, q_pe.dtype, widths, out_dtype=None if q_scale is None else E4M3, graph=graph
        )
        chosen = backends.select(request, backend).name
    frequencies, magnitude = angles_of(q_pe, rope, frequencies)
    return _ROTATIONS.run(signature, chosen, positions, q_pe, k_pe, frequencies, magnitude, rope.interleaved, q_scale)


def check_angles(
    positions: Int[Tensor, " T"], q_pe: Float[Tensor, "T N R"], rope: RopeConfig, frequencies: Tensor | None
) -> None:
    """Check shapes, dtypes and devices of the arguments that determine the angles of a rotation.

    Args:
        positions: [T].
        q_pe: [T, N, R].
        rope: rotary parameters.
        frequencies: [R/2], or None.

    Raises:
        ValueError: `positions` or `frequencies` has a wrong shape, dtype or device, or R is odd.
    """
    check_tensor("positions", positions, (q_pe.shape[0],), (torch.int64, torch.int32), q_pe.device)
    check_type("rope", rope, RopeConfig)
    check(q_pe.shape[-1] % 2 == 0, "dim", "an even number", q_pe.shape[-1])
    if frequencies is not None:
        check_tensor("frequencies", frequencies, (q_pe.shape[-1] // 2,), (wide_dtype(q_pe.dtype),), q_pe.device)


def angles_of(
    q_pe: Float[Tensor, "T N R"], rope: RopeConfig, frequencies: Tensor | None
) -> tuple[Float[Tensor, " R/2"], float]:
    """Return the rotary frequencies on the device of `q_pe`, and YaRN's magnitude factor.

    Args:
        q_pe: [T, N, R].
        rope: rotary parameters.
        frequencies: [R/2], returned unchanged; None computes the frequencies.

    Returns:
        Frequencies [R/2], float64 if `q_pe` is float64 and float32 otherwise; YaRN's magnitude factor (1.0 without
        YaRN).
    """
    if frequencies is None:
        frequencies = rotary_frequencies(rope, q_pe.shape[-1], wide_dtype(q_pe.dtype)).to(q_pe.device)
    return frequencies, 1.0 if rope.yarn is None else rope.yarn.cos_sin_scale


def _launch_rotation(positions, q_pe, k_pe, frequencies, magnitude, interleaved, q_scale, backend):
    check_scale_values("q_scale", q_scale)
    scale = () if q_scale is None else (q_scale,)
    return backends.kernel(backend, "apply_rope")(positions, q_pe, k_pe, frequencies, magnitude, interleaved, *scale)


_apply_rope = torch.library.custom_op(
    "mla_twins::apply_rope",
    _launch_rotation,
    mutates_args=(),
    schema="(Tensor positions, Tensor q_pe, Tensor k_pe, Tensor frequencies, float magnitude, bool interleaved,"
    " Tensor? q_scale, str backend) -> (Tensor, Tensor)",
)
_ROTATIONS = backends.CheckedCalls(torch.ops.mla_twins.apply_rope, _launch_rotation)


@_apply_rope.register_fake
def _(positions, q_pe, k_pe, frequencies, magnitude, interleaved, q_scale, backend):
    return q_pe.new_empty(q_pe.shape, dtype=q_pe.dtype if q_scale is None else E4M3), k_pe.new_empty(k_pe.shape)
