"""Declare the four backends of this package, "cpu", "triton", "hopper" and "torch", without importing their kernels."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re

import torch

from reference.interfaces import (
    COMPUTE_FORMAT,
    CONVERTED,
    E4M3,
    FLOAT_DTYPES,
    FP8_DS_MLA,
    FP8_E4M3,
    FP8_MODES,
    CacheFormat,
)
from reference.interfaces.gqa import KEY_VALUE_FORMATS

from .kernel_request import FEATURES, GQA_OPS, OPS
from .registry import Backend, OpSupport, register

DECODES = ("mla_decode", "decode_programs", "schedule_costs")  # one backend serves all three ops of a decode
MESSAGES = ("pack_attn_state", "merge_packed_attn_states")  # one backend writes and reads a message between ranks
ENTRY_OPS = (  # ops that write or read cache entries; they serve the cache formats of a backend
    "concat_and_cache_mla", "dequantize_entries", "gather_and_maybe_dequant_cache", "quantize_entries",
    "rope_norm_and_cache",
)  # fmt: skip
FORMATS = (COMPUTE_FORMAT, FP8_E4M3, FP8_DS_MLA)  # formats of latent caches that both "cpu" and "triton" serve
QUANTIZING_OPS = ("apply_rope", "merge_attn_states", "multiply_heads")  # ops whose output may be in e4m3
GPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
READS = {"pack_attn_state": "merge_packed_attn_states"}  # op that writes a message: op that reads the message


def missing(package: str, least: str | None = None) -> str | None:
    """Return what to install, or None if `package` is installed in version `least` or later; import no package."""
    if least is None:
        return None if importlib.util.find_spec(package) else package
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return package
    numbers = [[int(part) for part in re.findall(r"\d+", version)[:2]] for version in (found, least)]
    return None if numbers[0] >= numbers[1] else f"{package} {least} or later (found {found})"


def _ops_of(package: str, names: tuple[str, ...], **declared) -> dict[str, OpSupport]:
    """Declare the same support for several ops, whose launchers are in the package `fast.kernels.<package>`."""
    return {op: OpSupport(f"fast.kernels.{package}:{op}", reads=READS.get(op), **declared) for op in names}


def _ops_of_all(
    package: str, dtypes: tuple[torch.dtype, ...], formats: tuple[CacheFormat, ...]
) -> dict[str, OpSupport]:
    """Declare the support for `OPS`.

    `ENTRY_OPS` and `DECODES` serve the given cache formats, and `DECODES` also serve every fp8 mode. `reorg_kvcache`
    also serves the storage dtypes of the formats. The output of `QUANTIZING_OPS` and of `rope_norm_and_cache` may also
    be in e4m3, and `zero_padding_tokens` also serves e4m3.
    """
    names = tuple(each.name for each in formats)
    stored = tuple(each.storage_dtype for each in formats if each.storage_dtype is not None)
    return (
        _ops_of(package, OPS, dtypes=dtypes)
        | _ops_of(package, ENTRY_OPS, dtypes=dtypes, cache_formats=names)
        | _ops_of(package, DECODES, dtypes=dtypes, cache_formats=names, fp8_modes=FP8_MODES)
        | _ops_of(package, ("reorg_kvcache",), dtypes=(*dtypes, *stored))
        | _ops_of(package, ("zero_padding_tokens",), dtypes=(*dtypes, E4M3))
        | _ops_of(package, QUANTIZING_OPS, dtypes=dtypes, out_dtypes=(*dtypes, E4M3))
        | _ops_of(package, ("rope_norm_and_cache",), dtypes=dtypes, out_dtypes=(*dtypes, E4M3), cache_formats=names)
    )


def _gqa_ops(package: str, schedule_programs: str | None = None, **declared) -> dict[str, OpSupport]:
    """Declare the support for `GQA_OPS`: every format of a key/value cache, every feature, and what is given."""
    declared |= {"features": FEATURES, "cache_formats": KEY_VALUE_FORMATS, "fp8_modes": (CONVERTED, "fp8_query")}
    found = _ops_of(package, GQA_OPS, **declared)
    return found | _ops_of(package, ("gqa_paged_attention",), schedule_programs=schedule_programs, **declared)


CPU = Backend(
    name="cpu",
    priority=0,
    device_type="cpu",
    ops=_ops_of_all("cpu", FLOAT_DTYPES, FORMATS)
    | _ops_of("cpu", ("flash_attn_varlen",), dtypes=FLOAT_DTYPES, invariant_on_request=True)
    | _gqa_ops("cpu", batch_invariant=True),
)
TRITON = Backend(
    name="triton",
    priority=10,
    device_type="cuda",
    capability=(8, 0),
    ops=_ops_of_all("triton", GPU_DTYPES, FORMATS)
    | _ops_of("triton", ("flash_attn_varlen",), dtypes=GPU_DTYPES, invariant_on_request=True)
    | _gqa_ops("triton", "fast.kernels.triton.gqa.sizes:schedule_programs", dtypes=GPU_DTYPES),
    missing_package=missing("triton"),
)
HOPPER = Backend(
    name="hopper",
    priority=20,
    device_type="cuda",
    capability=(9, 0),
    capability_end=(10, 0),
    ops=_ops_of(
        "hopper",
        DECODES,
        dtypes=(torch.bfloat16, torch.float16),
        out_dtypes=GPU_DTYPES,
        cache_formats=(COMPUTE_FORMAT.name, FP8_E4M3.name),
        fp8_modes=FP8_MODES,
        format_modes={COMPUTE_FORMAT.name: (CONVERTED,)},
        head_dims={"kv_lora_rank": (256, 512), "qk_rope_head_dim": (0, 32, 64)},
        block_sizes=(16, 32, 64, 128),
        needs_words=True,
    )
    | _ops_of(
        "hopper",
        ("flash_attn_varlen",),
        dtypes=(torch.bfloat16, torch.float16),
        out_dtypes=GPU_DTYPES,
        head_dims={"qk_head_dim": (64, 96, 128, 192, 256), "v_head_dim": (64, 128, 256)},
        invariant_on_request=True,  # otherwise the sizes of the batch choose the splits of the keys
    ),
    missing_package=missing("triton", "3.6"),
)
TORCH = Backend(
    name="torch",
    priority=0,
    device_type="cuda",
    ops=_gqa_ops("torch", batch_invariant=False),  # the padding of a request depends on the other requests
)
OWN_BACKENDS = (CPU.name, TRITON.name, HOPPER.name, TORCH.name)


def register_own() -> None:
    """Register the four backends of this package."""
    for backend in (CPU, TRITON, HOPPER, TORCH):
        register(backend)
