"""The scale of a layer's absorbed queries in e4m3 (8 bits), for the decode modes `fp8_query` and `fp8_product`.

A layer takes this scale from the first of these sources that has a scale:

1. the argument `q_scale` of the layer;
2. the checkpoint: the attribute `q_scale` of the module (`MLAAttention.from_hf`);
3. a JSON file with the scales of a calibration, whose path is passed to `use_mla` (`CalibratedScales.queries`);
4. 1.0, with a warning by the constructor of the layer.

Queries are not stored, so the scale may change at any time. No step chooses a scale, because the results of all later
requests would then depend on the first prompt.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .cache_format import CacheFormat
from .checkpoint_scheme import check_checkpoint_scheme
from .checks import check, check_device, check_int, check_readable, check_tensor, check_type
from .kv_scales import ScaleSource, largest_entry, scale_number
from .metadata import MLAMetadata
from .quantization import CONVERTED, KeepsDtypes, check_mode_of_format


class QueryScale(KeepsDtypes):
    """The float32 scale of a layer's queries in e4m3, a buffer of the layer.

    Args:
        value: a number, or a tensor with one element, for all heads; or a tensor [N] with a scale for each head.
        num_heads: N, number of all heads of the config, also if ranks share the heads.
        source: where `value` comes from.
        device: device of the buffer; None takes the device of `value` if it is a tensor, otherwise the CPU.

    Attributes:
        value: float32 tensor, [] or [N].
        source: where the scale comes from.

    Raises:
        TypeError: `value` is neither a number nor a tensor.
        ValueError: the scale is not finite and positive, or has another shape.
    """

    def __init__(
        self,
        value: float | Tensor,
        num_heads: int,
        source: ScaleSource = ScaleSource.ARGUMENT,
        device: torch.device | None = None,
    ):
        super().__init__()
        check_int("num_heads", num_heads)
        numbers = query_scale_numbers("value", value, num_heads)
        if device is None:
            device = value.device if isinstance(value, Tensor) else numbers.device
        with torch.inference_mode(False):
            self.register_buffer("value", numbers.to(check_device("device", device)), persistent=False)
        self._numbers = numbers  # a copy on the CPU, because a buffer on the device meta has no values
        self.choose(value, source)

    def choose(self, value: float | Tensor, source: ScaleSource = ScaleSource.ARGUMENT) -> None:
        """Set the scale in place, because a captured graph reads the buffer. The host waits for a tensor on a GPU.

        Args:
            value: a number, a tensor with one element, or a tensor [N]. The buffer keeps its shape, so a tensor [N] is
                legal only if the layer was made with a tensor [N].
            source: where the scale comes from.

        Raises:
            TypeError: `value` is neither a number nor a tensor.
            ValueError: the scale is not finite and positive, or has another shape than the buffer.
        """
        check_type("source", source, ScaleSource)
        heads = self.value.shape[0] if self.value.dim() else 1
        numbers = query_scale_numbers("value", value, heads)
        check(numbers.dim() <= self.value.dim(), "value", "one scale for all heads", f"shape {list(numbers.shape)}")
        self._numbers = numbers.expand_as(self.value).clone()
        if not self.value.is_meta:
            self.value.copy_(self._numbers)
        self.source = source

    def _moved(self, name: str, device: torch.device) -> Tensor:
        """Return the scale on another device; on the device meta, the buffer has no numbers to move."""
        return (self._numbers if self.value.is_meta else self.value).to(device)


def query_scale_numbers(argument: str, value: float | Tensor, num_heads: int) -> Tensor:
    """Return a scale of queries as a float32 tensor on the CPU, [] or [N].

    Raises:
        TypeError: the scale is neither a number nor a tensor.
        ValueError: a number is not finite and positive in float32; the tensor is neither one number nor [N].
    """
    if not isinstance(value, Tensor) or value.numel() == 1:
        with torch.inference_mode(False):  # an inference tensor could not be overwritten later
            return torch.tensor(scale_number(argument, value), dtype=torch.float32, device="cpu")
    check_tensor(argument, value, (num_heads,))
    check_readable(argument, value)
    with torch.inference_mode(False):  # an inference tensor could not be overwritten later
        numbers = value.detach().to("cpu", torch.float32, copy=True)
    for number in numbers.tolist():
        scale_number(argument, number)
    return numbers


def make_query_scale(
    fp8_mode: str, cache_format: CacheFormat, value: float | Tensor | None, num_heads: int, device: torch.device
) -> QueryScale | None:
    """Return the `QueryScale` of a layer, or None for the mode `converted`, whose queries have no scale.

    Raises:
        TypeError: `fp8_mode` is not a string; `value` is neither a number, a tensor nor None.
        ValueError: the mode is unknown or needs another format; `value` is given for `converted`, or is invalid.
    """
    check_mode_of_format(fp8_mode, cache_format)
    if fp8_mode == CONVERTED:
        got = f"shape {list(value.shape)}" if isinstance(value, Tensor) and value.numel() > 1 else value
        check(value is None, "q_scale", f"None for fp8_mode {CONVERTED}", got)
        return None
    if value is None:
        warnings.warn(
            f"q_scale: a layer with fp8_mode {fp8_mode} has no scale for its queries, so the scale is 1.0; pass q_scale"
            " or calibrate the layer",
            stacklevel=3,
        )
        return QueryScale(1.0, num_heads, ScaleSource.DEFAULT, device)
    return QueryScale(query_scale_numbers("q_scale", value, num_heads), num_heads, device=device)


def checkpoint_query_scale(module: nn.Module) -> Tensor | float | None:
    """Return the attribute `q_scale` of a module, in which checkpoints store the scale of queries, or None.

    Raises:
        ValueError: the checkpoint stores scales for another scheme than e4m3 with static scales.
    """
    found = getattr(module, "q_scale", None)
    if not isinstance(found, (Tensor, float, int)):
        return None
    check_checkpoint_scheme("q_scale", module, queries=True)
    if isinstance(found, Tensor) and found.dim() == 3 and found.shape[1:] == (1, 1):
        return found[:, 0, 0]  # compressed-tensors stores one scale for each head as [N, 1, 1]
    return found


def observe_queries(layer: nn.Module, metadata: MLAMetadata, queries: Callable[[], tuple[Tensor, Tensor]]) -> None:
    """Record the largest absolute value of the absorbed queries of a step, if a calibration of the layer runs.

    The function reads the absorbed queries of all tokens except padding tokens. The tokens of prefills are included,
    because a decode would compute the same absorbed queries for them. Under context parallelism, all ranks get the same
    largest value.

    Args:
        layer: the `MLAAttention`, with the attributes `observed_queries` and `context_parallel`.
        metadata: plan of the step.
        queries: function that returns the absorbed queries [T, N, Lkv] and the rotated rope parts [T, N, R] of the
            step. It is called only if the values are needed.
    """
    tokens = metadata.num_actual_tokens
    if layer.observed_queries is None or tokens == 0:
        return
    found = largest_entry(*(x[:tokens] for x in queries()))
    ranks = layer.context_parallel
    layer.observed_queries.append(found if ranks is None else ranks.largest_of_heads(found))
