"""The scale of a layer's cache: where it comes from, when it is fixed, and the file of a calibration.

Only formats with `CacheFormat.layer_scale` have this scale. It comes from the first of these sources that exists:

1. the argument `kv_scale` of the layer;
2. the checkpoint: the attribute `kv_scale` or `k_scale` of the module (`MLAAttention.from_hf`), if the checkpoint was
   quantised for e4m3 (`checkpoint_scheme`);
3. a JSON file with the scales of a calibration (`calibrate_kv_scales`), whose path is passed to `use_mla`. The file
   also has the scales of queries (`reference.interfaces.query_scales`);
4. the first step with a prefill: the largest absolute value that this step writes becomes the largest e4m3 number;
5. 1.0, with a warning, if a decode or a graph capture comes before any prefill.

After the first write to the cache the scale is fixed, because the stored numbers mean something only with this scale.
Padding tokens are not written, so their values do not influence the scale. A memory-profile run, which is a call of the
layer without a plan, writes nothing and chooses no scale.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .cache_format import CACHE_FORMATS, E4M3_MAX, FP8_E4M3, CacheFormat, check_format
from .checkpoint_scheme import check_checkpoint_scheme
from .checks import check, check_device, check_readable, check_scale_values, check_tensor, check_type
from .metadata import MLAMetadata
from .quantization import KeepsDtypes, e4m3_scale
from .support import constant_when_traced, is_capturing


class ScaleSource(Enum):
    """Where the scale of a layer's cache comes from."""

    ARGUMENT = "argument"
    CHECKPOINT = "checkpoint"
    FIRST_PREFILL = "first prefill"
    DEFAULT = "1.0 by default"


class KVScale(KeepsDtypes):
    """The float32 scale of a layer's cache, a buffer of the layer.

    Args:
        value: the scale; None leaves the choice to the first write to the cache.
        source: where `value` comes from; unused if `value` is None.
        device: device of the buffer; None takes the device of `value` if it is a tensor, otherwise the CPU.
        name: name of the scale in messages: "kv_scale", or "k_scale" and "v_scale" in a layer that has both.

    Attributes:
        value: float32 tensor [], the scale; 1.0 until the scale is chosen.
        source: where the scale comes from; None until it is chosen.
        written: whether entries with this scale were written to a cache.

    Raises:
        TypeError: `value` is neither a number, a tensor nor None.
        ValueError: the scale is not finite and positive, or is a tensor with several elements.
    """

    def __init__(
        self,
        value: float | Tensor | None = None,
        source: ScaleSource = ScaleSource.ARGUMENT,
        device: torch.device | None = None,
        name: str = "kv_scale",
    ):
        super().__init__()
        check_type("source", source, ScaleSource)
        check_type("name", name, str)
        self.name = name
        device = device if device is None else check_device("device", device)
        with torch.inference_mode(False):  # PyTorch counts no changes of an inference tensor
            self.register_buffer("value", torch.ones((), dtype=torch.float32, device=device), persistent=False)
        self._number = 1.0  # the chosen scale as a float, because a buffer on the device meta has no values
        self.source: ScaleSource | None = None
        self.written = False
        self._changes = self.value._version  # how often PyTorch has seen a change of the buffer in place
        if value is not None:
            self.choose(value, source)

    def choose(self, value: float | Tensor, source: ScaleSource = ScaleSource.ARGUMENT) -> None:
        """Set the scale. A tensor on a GPU is read, so the host waits for the GPU.

        Args:
            value: a number, or a tensor with one element.
            source: where the scale comes from.

        Raises:
            TypeError: `value` is neither a number nor a tensor.
            ValueError: entries with the old scale were already written to a cache; the scale is not finite and
                positive; a tensor has several elements.
        """
        check_type("source", source, ScaleSource)
        number = scale_number("value", value)
        check(not self.written, self.name, "no change after the first write to the cache", number)
        self._number = number
        self.value.fill_(number)
        self._changes = self.value._version
        self.source = source

    def before_write(self, has_prefill: bool, largest: Callable[[], Tensor]) -> Tensor:
        """Return the scale for a write to the cache. If the scale has no source yet, the first write chooses the scale.

        Args:
            has_prefill: whether the step has tokens of a prefill.
            largest: function that returns the largest absolute value that the step writes, a tensor [] on the device of
                the scale. It is called only if the step may choose the scale; the host then waits for the device. If
                the largest value is 0, the step writes zeros or nothing, and a later step chooses the scale.

        Returns:
            float32 tensor [].

        Raises:
            ValueError: the code is being compiled, and the scale has no source yet.
        """
        if self.source is None:
            wanted = "a scale before torch.compile traces the layer: an argument, or one eager step with a prefill"
            check(not torch.compiler.is_compiling(), self.name, wanted, "no scale")
            if has_prefill and not is_capturing(self.value.device):
                found = largest().to(torch.float32)
                if not bool(found > 0):  # zeros are stored as zeros with any scale
                    return self.value
                self.value.copy_(e4m3_scale(found).clamp(min=torch.finfo(torch.float32).tiny))
                self._changes = self.value._version
                self.source = ScaleSource.FIRST_PREFILL
            else:
                warnings.warn(
                    f"{self.name}: a cache with one scale is written before any prefill, so the scale is 1.0; pass"
                    f" {self.name} or run a prefill first",
                    stacklevel=2,
                )
                self.source = ScaleSource.DEFAULT
        if not self.written:
            self.written = True
        return self.value

    def check_unchanged(self) -> None:
        """Raise if other code changed the buffer `value` in place. The check does not read the buffer.

        Under `torch.compile`, the check runs when the code is traced, and not in later calls of the compiled code.

        Raises:
            ValueError: the buffer was changed.
        """
        unchanged = self._changes == _changes_of(self.value)
        check(unchanged, self.name, "a scale that only KVScale.choose changes", "a buffer that was changed in place")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KVScale:
        if self.written:
            self.check_unchanged()
        super()._apply(fn, recurse)
        self._changes = self.value._version  # of the moved buffer
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._changes = self.value._version  # of the buffer of a copy

    def _moved(self, name: str, device: torch.device) -> Tensor:
        """Return the scale on another device; on the device meta, the buffer has no value to move."""
        return torch.full_like(self.value, self._number, device=device) if self.value.is_meta else self.value.to(device)


@constant_when_traced
def _changes_of(buffer: Tensor) -> int:
    """Return how often PyTorch has seen a change of the buffer in place."""
    return buffer._version


def make_kv_scale(cache_format: CacheFormat, value: float | Tensor | None, device: torch.device) -> KVScale | None:
    """Return the `KVScale` of a layer, or None if the format of its cache has no such scale.

    Raises:
        TypeError: `value` is neither a number, a tensor nor None.
        ValueError: `value` is given for a format without such a scale, or `value` is not finite and positive.
    """
    if cache_format.layer_scale:
        return KVScale(None if value is None else scale_number("kv_scale", value), device=device)
    check(value is None, "kv_scale", f"None for format {cache_format.name}", value)
    return None


def largest_entry(kv_c_normed: Tensor, k_pe: Tensor) -> Tensor:
    """Return the largest absolute value of latents [T, Lkv] and rope parts [T, R], float32 [].

    NaN and infinity are ignored.
    """
    sizes = [torch.nan_to_num(x.float().abs(), nan=0.0, posinf=0.0).amax() for x in (kv_c_normed, k_pe) if x.numel()]
    return torch.stack(sizes).amax()


def choose_kv_scale(layer: nn.Module, metadata: MLAMetadata, entries: Callable[[], tuple[Tensor, Tensor]]) -> None:
    """Choose the scale of a layer's cache before the first write to it.

    During a calibration, also record the largest absolute value of the step. Call this function after all checks of the
    step and before the write. Under context parallelism, all ranks get the same largest value, so that their scales
    agree.

    Args:
        layer: the `MLAAttention`, with the attributes `kv_scale`, `observed` and `context_parallel`.
        metadata: plan of the step.
        entries: function that returns the normed latents [T, Lkv] and the rotated rope parts [T, R] of the step. It is
            called only if the values are needed.

    Raises:
        ValueError: `torch.compile` traces the layer, and the scale has no source yet; the buffer of the scale was
            changed in place.
    """
    scale, observed, tokens = layer.kv_scale, layer.observed, metadata.num_actual_tokens
    if scale is not None:
        scale.check_unchanged()
    if tokens == 0 or (observed is None and (scale is None or scale.written)):
        return

    def largest() -> Tensor:
        written = metadata.slot_mapping[:tokens, None] >= 0  # under context parallelism: the tokens that this rank owns
        found = largest_entry(*(x[:tokens].masked_fill(~written, 0) for x in entries()))
        return found if layer.context_parallel is None else layer.context_parallel.largest(found)

    if observed is not None:
        observed.append(found := largest())
        largest = found.clone  # so that `before_write` does not compute the value again
    if scale is not None:
        scale.before_write(tokens > metadata.num_decode_tokens, largest)


def scale_number(argument: str, value: Any) -> float:
    """Return a scale as a float. If the scale is a tensor on a GPU, the host waits for the GPU.

    Raises:
        TypeError: the scale is neither a number nor a tensor.
        ValueError: the scale is not finite and positive in float32, or is a tensor with several elements, without
            values, or of a dtype that is not floating-point.
    """
    if isinstance(value, Tensor):
        check_tensor(argument, value, ("size",) * value.dim())
        check(value.numel() == 1, argument, "one scale for each layer", f"shape {list(value.shape)}")
        check_readable(argument, value)
        value = float(value)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        check_type(argument, value, float, "a number or a tensor")
    fits = 0 < value < 2.0**128  # PyTorch cannot convert a very large int
    number = float(torch.tensor(value, dtype=torch.float32, device="cpu")) if fits else math.nan
    check(0 < number < math.inf, argument, "a finite number above 0", value)
    return number


def checkpoint_scale(module: nn.Module) -> Tensor | float | None:
    """Return the scale that a checkpoint stores for the cache of a module, or None.

    Quantisation tools such as compressed-tensors store the scale as the attribute `k_scale` or `kv_scale` of the
    module.

    Raises:
        ValueError: the module has both scales, and they differ; a scale is not one finite and positive number; the
            checkpoint stores scales for another scheme than e4m3 with one static scale.
    """
    found = {name: getattr(module, name, None) for name in ("kv_scale", "k_scale")}
    found = {name: value for name, value in found.items() if isinstance(value, (Tensor, float, int))}
    for name in found:
        check_checkpoint_scheme(name, module)
    numbers = {name: scale_number(name, value) for name, value in found.items()}
    check(len(set(numbers.values())) <= 1, "kv_scale", f"k_scale {numbers.get('k_scale')}", numbers.get("kv_scale"))
    return next(iter(found.values()), None)


class CalibratedScales(dict[str, float]):
    """Scales of a calibration: a mapping from the name of a layer to the scale of its cache.

    A key/value cache has two scales: the mapping then has the scale of the keys.

    Args:
        caches: mapping from the name of a layer to the scale of its cache.
        queries: mapping from the name of a layer to the scale of its queries in e4m3 (8 bits).
        cached_values: mapping from the name of a layer to the scale of the values in its key/value cache.

    Attributes:
        queries: the scales of the queries, by the name of the layer; empty if the calibration has none.
        cached_values: the scales of the values in key/value caches, by the name of the layer; empty if there are none.

    Raises:
        TypeError: an argument is neither a mapping nor None.
    """

    def __init__(
        self,
        caches: Mapping[str, float] | None = None,
        queries: Mapping[str, float] | None = None,
        cached_values: Mapping[str, float] | None = None,
    ):
        for name, scales in (("caches", caches), ("queries", queries), ("cached_values", cached_values)):
            check_type(name, scales, (Mapping, type(None)), "a mapping or None")
        super().__init__({} if caches is None else caches)
        self.queries: dict[str, float] = {} if queries is None else dict(queries)
        self.cached_values: dict[str, float] = {} if cached_values is None else dict(cached_values)


def _scale_of(largest: list[Tensor]) -> float:
    """Return the scale with which the largest recorded value becomes the largest e4m3 number; 1.0 if the value is 0."""
    number = float(torch.stack([value.float() for value in largest]).amax())
    return number / E4M3_MAX if number > 0 else 1.0


@contextlib.contextmanager
def calibrate_kv_scales(layers: Mapping[str, nn.Module]) -> Iterator[CalibratedScales]:
    """Record the largest absolute values of each layer, and compute scales at the end of the `with` block.

    The scale of a cache comes from the values that the layer writes to its cache; a key/value cache has one scale for
    the keys and one for the values. The scale of queries comes from the queries of all tokens, also of prefills (in
    MLA, from the absorbed queries). The caches of the layers may have any format. Run a few prompts inside the `with`
    block.

    Args:
        layers: mapping from the name of a layer to its `MLAAttention` or `GQAAttention`. A layer that reads the cache
            of another layer gets no scale of a cache.

    Yields:
        Mapping from the name of a layer to the scale of its cache, or of its cached keys. The attributes `queries` and
        `cached_values` of this mapping have the scales of the queries and of cached values. Mapping and attributes are
        empty until the `with` block ends.

    Raises:
        TypeError: `layers` is not a mapping to layers.
        ValueError: a layer ran no step inside the `with` block.
    """
    check_type("layers", layers, Mapping)
    for name, layer in layers.items():
        check(hasattr(layer, "observed"), "layers", f"an attention layer at {name!r}", type(layer).__name__)
    scales = CalibratedScales()
    lists = ("observed", "observed_values", "observed_queries")
    recorded = [(layer, each) for layer in layers.values() for each in lists if hasattr(layer, each)]
    for layer, each in recorded:  # an `MLAAttention` has no `observed_values`
        setattr(layer, each, [])
    try:
        yield scales
    finally:
        observed = {name: [getattr(layer, each, None) for each in lists] for name, layer in layers.items()}
        for layer, each in recorded:
            setattr(layer, each, None)
    for name, (entries, values, queries) in observed.items():
        found = entries or queries
        check(len(found) > 0, "layers", f"a step of the layer {name!r} in the with block", "no step")
        for result, largest in ((scales, entries), (scales.cached_values, values), (scales.queries, queries)):
            if largest:
                result[name] = _scale_of(largest)


_EXTRA_SCALES = {"q_scales": "queries", "v_scales": "cached_values"}  # keys of the file, attributes of the scales


def save_kv_scales(path: str | os.PathLike, scales: Mapping[str, float], cache_format: CacheFormat = FP8_E4M3) -> None:
    """Write the scales of a calibration to a JSON file.

    Args:
        path: the file; an existing file is replaced.
        scales: mapping from the name of a layer to the scale of its cache. The file also gets the scales of queries and
            of cached values if `scales` is a `CalibratedScales`.
        cache_format: format of the caches that use the scales. The scales of queries do not depend on this format.

    Raises:
        ValueError: a scale is not finite and positive, or the format does not have one scale for each layer.
    """
    check_path(path)
    check_format(cache_format)
    check(cache_format.layer_scale, "cache_format", "a format with one scale for each layer", cache_format.name)
    check_type("scales", scales, Mapping)
    content = {"cache_format": cache_format.name, "kv_scales": _numbers("scales", scales)}
    if isinstance(scales, CalibratedScales):
        for key, name in _EXTRA_SCALES.items():
            if found := getattr(scales, name):
                content[key] = _numbers(f"scales.{name}", found)
    Path(path).write_text(json.dumps(content, indent=1) + "\n")


def _numbers(argument: str, scales: Mapping[str, Any]) -> dict[str, float]:
    """Return a dict from the name of each layer to its scale as a float."""
    return {str(name): scale_number(f"{argument}[{name!r}]", value) for name, value in scales.items()}


def load_kv_scales(path: str | os.PathLike, cache_format: CacheFormat = FP8_E4M3) -> CalibratedScales:
    """Read the scales of a calibration from a JSON file that `save_kv_scales` wrote.

    Args:
        path: the file.
        cache_format: format of the caches that will use the scales.

    Returns:
        Mapping from the name of a layer to the scale of its cache. The attributes `queries` and `cached_values` of this
        mapping have the scales of queries and of cached values; an attribute is empty if the file has none.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a file of `save_kv_scales`, is for another format, or has an invalid scale.
    """
    check_path(path)
    check_format(cache_format)
    try:
        found = json.loads(Path(path).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        check(False, "path", "a JSON file of save_kv_scales", str(error))
    valid = isinstance(found, dict) and isinstance(found.get("kv_scales"), dict)
    check(valid, "path", "a JSON file of save_kv_scales", type(found).__name__)
    stored_for = found.get("cache_format")
    check(stored_for in CACHE_FORMATS, "path", f"a cache_format among {', '.join(CACHE_FORMATS)}", stored_for)
    check(stored_for == cache_format.name, "path", f"scales for format {cache_format.name}", stored_for)
    extra = {}
    for key, name in _EXTRA_SCALES.items():
        scales = found.get(key, {})
        check(isinstance(scales, dict), "path", f"{key} by the name of a layer", type(scales).__name__)
        extra[name] = _numbers(key, scales)
    return CalibratedScales(_numbers("kv_scales", found["kv_scales"]), **extra)


def check_path(path: str | os.PathLike) -> None:
    """Check that an argument is a path."""
    check_type("path", path, (str, os.PathLike), "a path")


def check_equal_scales(source: Tensor | None, target: Tensor | None, kv_cache: Tensor | None = None) -> None:
    """Check that two caches between which blocks are copied have the same scales. The check reads all scales.

    If both scales are None, there is nothing to compare: a cache does not contain its scale.

    Args:
        source: scale of the source cache: [] for a latent cache, [2] (of keys and of values) for a key/value cache.
        target: scale of the target cache, of the same shape.
        kv_cache: one of the caches, which determines the shape; None means a latent cache.

    Raises:
        ValueError: a scale is missing, or is not finite and positive; the scales differ.
    """
    if source is None and target is None:
        return
    shape, values = (2,) if kv_cache is not None and kv_cache.dim() == 5 else (), []
    for name, scale in (("source_scale", source), ("target_scale", target)):
        check(scale is not None, name, f"a float32 tensor {list(shape)}, because the other cache has a scale", None)
        check_tensor(name, scale, shape, (torch.float32,))
        check_readable(name, scale)
        values.append(scale.tolist())  # on a GPU, the only wait for this scale
        check_scale_values(name, torch.tensor(values[-1], device="cpu"))
    check(values[0] == values[1], "target_scale", f"{values[0]}, the scale of source", values[1])
