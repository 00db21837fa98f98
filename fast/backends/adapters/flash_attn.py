"""Adapters to flash-attn 2, 3 and 4: attention of packed requests, with an LSE.

| backend | modules, the first that can be imported | GPUs |
|---|---|---|
| `flash_attn_2` | `flash_attn`; vLLM's `vllm_flash_attn` | compute capability 8.0 and later |
| `flash_attn_3` | `flash_attn_interface`; `fa3_fwd_interface` (bfloat16 only); vLLM's `vllm_flash_attn` | 9.x |
| `flash_attn_4` | `flash_attn.cute`; vLLM's `vllm_flash_attn.cute` | 9.x to 11.x, never chosen without its name |

`flash_attn_decode` has the absorbed decode of flash-attn 3, and `flash_attn_gqa` has grouped-query attention of
flash-attn 2 and 3.

NaN in values: flash-attn 2 reads the keys and values of one request only. flash-attn 3 and 4 read values in whole tiles
of up to 176 tokens, and multiply the values after the last key of a request by 0. These values belong to the next
requests of the batch, or to no request if the call is `bounded`. If such a value is NaN or infinite, the output of the
request becomes NaN too (Dao-AILab/flash-attention, issue 2374). A layer of this project passes zeros in the place of
values that belong to no request.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from reference.interfaces import (
    CAUSAL,
    CAUSAL_OVER_RANKS,
    NEUTRAL_COSTS,
    GraphSupport,
    QueryLenSupport,
    ScheduleCosts,
)

from ..kernel_request import KernelRequest
from ..registry import Backend, OpSupport
from .conversion import Convention
from .sources import Source, is_installed, loaded, missing_artifacts, missing_package
from .varlen_calls import VarlenCall

HALF = (torch.bfloat16, torch.float16)
STATE_DTYPES = (torch.float32, *HALF)  # dtypes of the output: a kernel writes the dtype of `q`, the adapter converts
VLLM = "vllm.vllm_flash_attn.flash_attn_interface"
FA3_FWD = Source("fa3-fwd", "fa3_fwd_interface")  # has no float16 kernel, and no kernel for a paged cache
SOURCES_2 = (Source("flash-attn", "flash_attn.flash_attn_interface"), Source("vllm", VLLM, "FA2_AVAILABLE"))
SOURCES_3 = (Source("flash-attn-3", "flash_attn_interface"), FA3_FWD, Source("vllm", VLLM, "FA3_AVAILABLE"))
SOURCES_3_OF_ALL = tuple(each for each in SOURCES_3 if each != FA3_FWD)  # sources with every kernel of flash-attn 3
RANK_ARGUMENTS = ("cp_world_size", "cp_rank", "cp_tot_seqused_k")  # of context parallelism
SOURCES_3_OF_RANKS = (Source("vllm", VLLM, "FA3_AVAILABLE", RANK_ARGUMENTS),)
NEW_IN_4 = ("max_seqlen_q", "return_lse", "num_splits")  # flash-attn 2.8 has an older `flash_attn.cute` without them
SOURCES_4 = (
    Source("flash-attn-4", "flash_attn.cute.interface", parameters=NEW_IN_4),
    Source("vllm", "vllm.vllm_flash_attn.cute.interface", parameters=NEW_IN_4),
)
# flash-attn computes with other tiles if no query has more than 1 token (2) or 64 tokens (3). A larger bound avoids
# these tiles, so that the result of a request does not depend on the longest query of its batch.
LEAST_QUERY_BOUND = {2: 2, 3: 65, 4: 1}
POISONED = Convention(poison=True)  # flash-attn 3 and 4 give rows with NaN the LSE -inf
CONVENTIONS = {2: Convention(empty_is_inf=True), 3: POISONED, 4: POISONED}


class FlashAttnCall(VarlenCall):
    """Attention of packed requests with one version of flash-attn.

    Args:
        version: 2, 3 or 4.
        sources: modules that have the kernels.
        arguments: arguments of the first call.
    """

    def __init__(self, version: int, sources: tuple[Source, ...], *arguments):
        self._version, self._sources, self.convention = version, sources, CONVENTIONS[version]
        super().__init__(*arguments)

    def columns_of_values(self, dim: int, value: int) -> int:
        """Return how many columns the values must have for keys of `dim` columns: `value`, or `dim` if padded."""
        return _value_columns(self._version, dim, value)

    def prepare(self, dtype: torch.dtype, longest_q: int, longest_k: int, scale: float, causal: bool) -> bool:
        """Keep the module of the library and the constant arguments; only vLLM's function writes into `out`."""
        source, self._library = loaded(self._sources)
        self._options = {
            "max_seqlen_q": max(longest_q, LEAST_QUERY_BOUND[self._version]), "max_seqlen_k": longest_k,
            "softmax_scale": scale, "causal": causal,
        }  # fmt: skip
        if source.module == VLLM:
            self._options |= {"return_softmax_lse": True, "num_splits": 1, "fa_version": self._version}
        elif self._version == 2:  # never splits keys, because there are as many heads of keys as of queries
            self._options |= {"return_attn_probs": True}
        elif self._version == 3:
            self._options |= {"return_attn_probs": True, "num_splits": 1}
        else:
            self._options |= {"return_lse": True, "num_splits": 1}
        return source.module == VLLM

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Call the library; return its output and its LSE."""
        options = self._options if out is None else {**self._options, "out": out}
        made, lse, *_ = self._library.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, **options
        )
        return made, lse


def _value_columns(version: int, dim: int, value: int) -> int:
    """Return how many columns the values must have for keys of `dim` columns: `value`, or `dim` if they are padded."""
    if version == 3 and 128 < dim <= 192 and 96 < value <= 128 and value % 8 == 0:
        return value
    return value if version == 4 and (dim, value) == (192, 128) else dim


def kept_varlen_2(*arguments) -> FlashAttnCall:
    """Return the function for later calls of flash-attn 2 with the same signature."""
    return FlashAttnCall(2, SOURCES_2, *arguments)


def kept_varlen_3(*arguments) -> FlashAttnCall:
    """Return the function for later calls of flash-attn 3; only some sources have float16 kernels."""
    sources = SOURCES_3 if arguments[0].dtype == torch.bfloat16 else SOURCES_3_OF_ALL
    return FlashAttnCall(3, sources, *arguments)


def kept_varlen_4(*arguments) -> FlashAttnCall:
    """Return the function for later calls of flash-attn 4 with the same signature."""
    return FlashAttnCall(4, SOURCES_4, *arguments)


def flash_attn_varlen_2(*arguments) -> tuple[Tensor, Tensor | None]:
    """Compute attention of packed requests with flash-attn 2 (`VarlenCall.__call__`)."""
    return kept_varlen_2(*arguments)(*arguments)


def flash_attn_varlen_3(*arguments) -> tuple[Tensor, Tensor | None]:
    """Compute attention of packed requests with flash-attn 3 (`VarlenCall.__call__`)."""
    return kept_varlen_3(*arguments)(*arguments)


def flash_attn_varlen_4(*arguments) -> tuple[Tensor, Tensor | None]:
    """Compute attention of packed requests with flash-attn 4 (`VarlenCall.__call__`)."""
    return kept_varlen_4(*arguments)(*arguments)


def decode_programs(*arguments, **options) -> int:
    """Return 0: the library makes its own schedule, and a schedule of `plan_decode` is not used."""
    return 0


def schedule_costs(*arguments, **options) -> ScheduleCosts:
    """Return neutral costs, because the library makes its own schedule."""
    return NEUTRAL_COSTS


def missing_2() -> list[str]:
    """Return why flash-attn 2 cannot be imported."""
    return missing_artifacts(SOURCES_2)


def missing_3() -> list[str]:
    """Return why flash-attn 3 cannot be imported."""
    return missing_artifacts(SOURCES_3)


def missing_4() -> list[str]:
    """Return why flash-attn 4 cannot be imported."""
    return missing_artifacts(SOURCES_4)


def _prefill(version: int, dtypes: tuple[torch.dtype, ...], **declared) -> dict[str, OpSupport]:
    """Declare `flash_attn_varlen` of one version."""
    return {
        "flash_attn_varlen": OpSupport(
            f"{__name__}:flash_attn_varlen_{version}",
            kept_call=f"{__name__}:kept_varlen_{version}",
            dtypes=dtypes,
            out_dtypes=STATE_DTYPES,
            head_dims={"qk_head_dim": tuple(range(8, 257, 8))},
            masks=("causal",),
            whole_keys=True,
            narrow_values=True,
            **declared,
        )
    }


def decode_ops(launcher: str | Callable, **declared) -> dict[str, OpSupport]:
    """Declare the three ops of a decode whose schedule the library makes; `declared` describes `mla_decode`.

    The ops serve only calls that name their backend.
    """
    shared = {"only_named": True, "dtypes": declared["dtypes"], "cache_formats": declared["cache_formats"],
              "fp8_modes": declared["fp8_modes"], "head_dims": declared["head_dims"],
              "block_sizes": declared["block_sizes"], "format_modes": declared.get("format_modes", {})}  # fmt: skip
    return {
        "mla_decode": OpSupport(launcher, only_named=True, **{"masks": (CAUSAL,), **declared}),
        "decode_programs": OpSupport(f"{__name__}:decode_programs", **shared),
        "schedule_costs": OpSupport(f"{__name__}:schedule_costs", **shared),
    }


def gqa_ops(version: int) -> dict[str, OpSupport]:
    """Declare the ops of grouped-query attention of flash-attn 2 or 3 (`flash_attn_gqa`).

    The package fa3-fwd has neither float16 kernels nor kernels for a paged cache. Page sizes of flash-attn 2 are
    multiples of 16 tokens with vLLM's copy, and multiples of 256 tokens with the package `flash_attn`.
    """
    module, narrow = "fast.backends.adapters.flash_attn_gqa", version == 3 and _only_fa3_fwd()
    declared = dict(
        out_dtypes=STATE_DTYPES,
        head_dims={"head_dim": tuple(range(8, 257, 8))},
        masks=("causal",),
        features=("sinks", "soft_cap", "window", *(("alibi",) if version == 2 else ())),
        batch_invariant=False,  # tiles and splits depend on the longest query and on the number of requests
        graph=GraphSupport.NONE,
        only_named=True,
    )
    packed = OpSupport(
        f"{module}:gqa_varlen_attention_{version}", dtypes=HALF[:1] if narrow else HALF, mixes_nan=version == 3,
        **declared,
    )  # fmt: skip
    if narrow:
        return {"gqa_varlen_attention": packed}
    step = 16 if version == 3 or is_installed(VLLM) else 256
    paged = OpSupport(
        f"{module}:gqa_paged_attention_{version}", dtypes=HALF, block_sizes=tuple(range(step, 1025, step)),
        cache_reasons=f"{module}:cache_reasons_{version}", **declared,
    )  # fmt: skip
    return {"gqa_paged_attention": paged, "gqa_varlen_attention": packed}


def _only_fa3_fwd() -> bool:
    """Return whether fa3-fwd is the only installed source of flash-attn 3."""
    return is_installed(FA3_FWD.module) and missing_package(SOURCES_3_OF_ALL) is not None


_DECODE_3 = {} if _only_fa3_fwd() else decode_ops(
    "fast.backends.adapters.flash_attn_decode:mla_decode",
    kept_call="fast.backends.adapters.flash_attn_decode:kept_decode",
    dtypes=HALF,
    out_dtypes=STATE_DTYPES,
    cache_formats=("compute_dtype",),
    fp8_modes=("converted",),
    head_dims={"kv_lora_rank": (512,), "qk_rope_head_dim": (64,)},
    block_sizes=(16, 32, 64, 128),
    batch_invariant=False,  # the kernel's tiles depend on the longest query of the batch
    query_lens=QueryLenSupport.VARLEN,
    needs_words=True,
    masks=(CAUSAL, CAUSAL_OVER_RANKS) if is_installed(VLLM) else (CAUSAL,),
)  # fmt: skip


class FlashAttn3Backend(Backend):
    """A `Backend` that also checks whether vLLM's copy can serve a decode under context parallelism."""

    def validate_configuration(self, request: KernelRequest) -> list[str]:
        """Return every reason why flash-attn 3 cannot serve `request`."""
        reasons = super().validate_configuration(request)
        if not reasons and request.mask == CAUSAL_OVER_RANKS:
            reasons = [f"{self.name}: {reason}" for reason in missing_artifacts(SOURCES_3_OF_RANKS)]
        return reasons

    def missing_for(self, request: KernelRequest) -> tuple[str, ...]:
        """Return what of flash-attn 3 is missing for `request`; vLLM's copy for a decode under context parallelism."""
        found = self.missing()
        if found or request.mask != CAUSAL_OVER_RANKS:
            return found
        return tuple(missing_artifacts(SOURCES_3_OF_RANKS))


FLASH_ATTN_2 = Backend(
    name="flash_attn_2",
    priority=-5,
    device_type="cuda",
    ops=_prefill(2, HALF) | gqa_ops(2),
    capability=(8, 0),
    missing_package=missing_package(SOURCES_2),
    library="flash-attn 2",
    install="pip install flash-attn, or pip install vllm",
    missing_artifacts=f"{__name__}:missing_2",
)
FLASH_ATTN_3 = FlashAttn3Backend(
    name="flash_attn_3",
    priority=-5,
    device_type="cuda",
    ops=_prefill(3, HALF[:1] if _only_fa3_fwd() else HALF, mixes_nan=True, priority=15) | _DECODE_3 | gqa_ops(3),
    capability=(9, 0),
    capability_end=(10, 0),
    missing_package=missing_package(SOURCES_3),
    library="flash-attn 3",
    install="pip install fa3-fwd, or pip install vllm",
    missing_artifacts=f"{__name__}:missing_3",
    hooks="fast.mla.decode_hooks:FlashAttn3Hooks" if _DECODE_3 else None,
)
FLASH_ATTN_4 = Backend(
    name="flash_attn_4",
    priority=-5,
    device_type="cuda",
    ops=_prefill(4, HALF, mixes_nan=True, batch_invariant=False),
    capability=(9, 0),
    capability_end=(12, 0),
    missing_package=missing_package(SOURCES_4),
    library="flash-attn 4",
    install="pip install flash-attn-4",
    missing_artifacts=f"{__name__}:missing_4",
    only_named=True,
)
