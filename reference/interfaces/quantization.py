"""Numbers in e4m3 (8 bits) outside of the cache: weights, queries and outputs, with float32 scales.

A number x is stored as x / scale, rounded to the nearest e4m3 number (ties to even). The stored number stands for its
product with the scale. A quotient beyond the largest e4m3 number becomes +448 or -448, and NaN stays NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from .cache_format import E4M3, E4M3_MAX, CacheFormat, check_format
from .checks import check, check_flag, check_tensor, check_type, wide_dtype
from .config import MLAConfig
from .errors import UnsupportedConfiguration

CONVERTED = "converted"
FP8_MODES = (CONVERTED, "fp8_query", "fp8_product")  # which products of a decode are computed in e4m3 (`mla_decode`)
LEAST_WEIGHT = 1e-10  # a scale is computed from the largest absolute weight, or from this number if it is larger


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """An absorbed weight in e4m3: one matrix for each head (`quantize_weight`).

    Attributes:
        values: [N, K, M] in e4m3, a matrix of K rows and M columns for each head; any strides.
        scale: float32, [] for one scale, or [N] for one scale for each head. The weight is `values` times `scale`.
    """

    values: Shaped[Tensor, "N K M"]
    scale: Shaped[Tensor, "*heads"]

    @property
    def shape(self) -> torch.Size:
        """The shape [N, K, M] of the weight."""
        return self.values.shape


class KeepsDtypes(nn.Module):
    """Base of modules whose buffers move to other devices with a layer, but keep their dtypes if the layer is cast."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KeepsDtypes:
        for name, buffer in self._buffers.items():
            device = fn(buffer.new_empty(0)).device
            with torch.inference_mode(False):  # an inference tensor could not be overwritten later
                self._buffers[name] = self._moved(name, device)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        with torch.inference_mode(False):  # a copy that was made in inference mode has inference tensors
            for name, buffer in self._buffers.items():
                self._buffers[name] = buffer.clone() if buffer.is_inference() else buffer

    def _moved(self, name: str, device: torch.device) -> Tensor:
        """Return a buffer on another device. A buffer on the device meta has no values, so they are undefined then."""
        buffer = self._buffers[name]
        return torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)


class AbsorbedWeights(KeepsDtypes):
    """The two absorbed weights of a layer in e4m3, as buffers, so that they move to other devices with the layer.

    Attributes:
        w_uk_t: [N, P, Lkv], for `query_to_latent`.
        w_uv: [N, Lkv, V], for `latent_to_value`.
    """

    w_uk_t: QuantizedWeight
    w_uv: QuantizedWeight

    def store(self, w_uk_t: QuantizedWeight, w_uv: QuantizedWeight) -> None:
        """Store new weights.

        If shapes and device have not changed, the old weights are overwritten, because captured graphs read the memory
        of the old weights.
        """
        with torch.no_grad(), torch.inference_mode(False):  # an inference tensor could not be overwritten later
            for name, weight in (("w_uk_t", w_uk_t), ("w_uv", w_uv)):
                for part, new in (("values", weight.values), ("scale", weight.scale)):
                    held = getattr(self, f"{name}_{part}", None)
                    if held is not None and held.shape == new.shape and held.device == new.device:
                        held.copy_(new)
                    else:
                        self.register_buffer(f"{name}_{part}", new.clone(), persistent=False)
        self._read_buffers()

    def _read_buffers(self) -> None:
        self.w_uk_t = QuantizedWeight(self.w_uk_t_values, self.w_uk_t_scale)
        self.w_uv = QuantizedWeight(self.w_uv_values, self.w_uv_scale)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AbsorbedWeights:
        super()._apply(fn, recurse)
        self._read_buffers()
        return self


def to_e4m3(x: Float[Tensor, "*any"], scale: Float[Tensor, "*#any"]) -> Shaped[Tensor, "*any"]:
    """Return x / scale in e4m3, with the quotient computed in float32.

    Args:
        x: numbers of any float dtype.
        scale: float32, of a shape that can be broadcast to the shape of `x`.
    """
    quotient = x.to(torch.float32) / scale
    return torch.where(quotient.isnan(), torch.nan, quotient.clamp(-E4M3_MAX, E4M3_MAX)).to(E4M3)


def from_e4m3(
    stored: Shaped[Tensor, "*any"], scale: Float[Tensor, "*#any"], dtype: torch.dtype
) -> Float[Tensor, "*any"]:
    """Return numbers in e4m3 times their scale, with the product computed in float32 (float64 for float64).

    Args:
        stored: numbers in e4m3.
        scale: float32, of a shape that can be broadcast to the shape of `stored`.
        dtype: dtype of the result, to which the product is rounded.
    """
    wide = wide_dtype(dtype)
    return (stored.to(wide) * scale.to(wide)).to(dtype)


def e4m3_scale(largest: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Return the scale with which `largest` is stored as 448, the largest e4m3 number; same bits on all devices.

    Args:
        largest: float32, numbers of at least 0, on any device.
    """
    # the divisor is a tensor: PyTorch on a GPU would multiply by the reciprocal of a Python number, with other rounding
    return largest / torch.full((), E4M3_MAX, device=largest.device)


def check_weight(argument: str, weight: Tensor | QuantizedWeight, shape: tuple[int | str, ...], like: Tensor) -> None:
    """Check an absorbed weight: a tensor in the dtype of the numbers that it multiplies, or a `QuantizedWeight`.

    The check reads no values.

    Args:
        argument: name of the argument.
        weight: the weight.
        shape: expected shape [N, K, M].
        like: the tensor that the weight multiplies.

    Raises:
        TypeError: the weight is neither a tensor nor a `QuantizedWeight`.
        ValueError: shape, dtype or device are wrong.
    """
    if not isinstance(weight, QuantizedWeight):
        check_tensor(argument, weight, shape, (like.dtype,), like.device)
        return
    check_tensor(f"{argument}.values", weight.values, shape, (E4M3,), like.device)
    check_scale(f"{argument}.scale", weight.scale, weight.values.shape[0], like.device)


def check_scale(argument: str, scale: Tensor, num_heads: int | None, device: torch.device) -> None:
    """Check a float32 scale: a tensor [], or [N] if `num_heads` is given. The check does not read the values.

    Raises:
        TypeError: the scale is not a tensor.
        ValueError: shape, dtype or device are wrong.
    """
    check_type(argument, scale, Tensor, "a tensor")
    per_head = num_heads is not None and scale.dim() == 1
    if num_heads is not None and scale.layout == torch.strided and not scale.is_nested and scale.dim() > 1:
        check(False, argument, f"shape [] or [{num_heads}]", list(scale.shape))
    check_tensor(argument, scale, (num_heads,) if per_head else (), (torch.float32,), device)


def check_output_scale(
    output_scale: Tensor | None, output_block_scale: object, device: torch.device, num_heads: int | None = None
) -> None:
    """Check the scale of an output in e4m3, and check that `output_block_scale` is None.

    Args:
        output_scale: float32 scale; None for an output without quantisation.
        output_block_scale: must be None: no function supports an output with one scale for each group of elements.
        device: device of the output.
        num_heads: N if the scale may be [N]; None if it must be [].

    Raises:
        TypeError: the scale is not a tensor.
        ValueError: shape, dtype or device are wrong.
        UnsupportedConfiguration: `output_block_scale` is not None.
    """
    if output_block_scale is not None:
        wanted = "output_block_scale: block-scaled outputs are not implemented; use output_scale, or None"
        raise UnsupportedConfiguration([f"{wanted}, got {type(output_block_scale).__name__}"])
    if output_scale is not None:
        check_scale("output_scale", output_scale, num_heads, device)


def check_fp8_mode(fp8_mode: str, argument: str = "fp8_mode") -> None:
    """Check that a mode is one of `FP8_MODES`."""
    check_type(argument, fp8_mode, str)
    check(fp8_mode in FP8_MODES, argument, f"one of {', '.join(FP8_MODES)}", fp8_mode)


def check_mode_of_format(fp8_mode: str, cache_format: CacheFormat, config: MLAConfig | None = None) -> None:
    """Check that a mode is one of `FP8_MODES`, and that a cache of the format can be attended in this mode.

    If a config is given, also check that the format supports its dims.
    """
    check_fp8_mode(fp8_mode)
    check_format(cache_format, config)
    check(cache_format.scaled or fp8_mode == CONVERTED, "fp8_mode", f"{CONVERTED} for format {cache_format.name}",
          fp8_mode)  # fmt: skip


def check_weight_to_quantize(weight: Tensor, per_head: bool) -> None:
    """Check the arguments of `quantize_weight`; read no values."""
    check_tensor("weight", weight, ("N", "K", "M"))
    check_flag("per_head", per_head)
