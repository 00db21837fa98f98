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

import functools
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from reference.interfaces import NEUTRAL_COSTS, GraphSupport, QueryLenSupport, ScheduleCosts

from ..registry import Backend, OpSupport
from .conversion import Convention, in_words, is_in_words, lawful_state, pad_columns
from .sources import Source, is_installed, loaded, missing_artifacts, missing_package

HALF = (torch.bfloat16, torch.float16)
STATE_DTYPES = (torch.float32, *HALF)  # dtypes of the output: a kernel writes the dtype of `q`, the adapter converts
VLLM = "vllm.vllm_flash_attn.flash_attn_interface"
FA3_FWD = Source("fa3-fwd", "fa3_fwd_interface")  # has no float16 kernel, and no kernel for a paged cache
SOURCES_2 = (Source("flash-attn", "flash_attn.flash_attn_interface"), Source("vllm", VLLM, "FA2_AVAILABLE"))
SOURCES_3 = (Source("flash-attn-3", "flash_attn_interface"), FA3_FWD, Source("vllm", VLLM, "FA3_AVAILABLE"))
SOURCES_3_OF_ALL = tuple(each for each in SOURCES_3 if each != FA3_FWD)  # sources with every kernel of flash-attn 3
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


def _attend(
    version: int,
    sources: tuple[Source, ...],
    q: Tensor,
    k: Tensor,
    k_pe: None,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention of packed requests with one version of flash-attn.

    Besides the library's call: one padded copy of `v` if the kernel needs values as wide as keys, and one conversion of
    the LSE, with the output if its dtype, width or place differs.

    Args:
        version: 2, 3 or 4.
        sources: modules that have the kernels.
        q: [T, N, D], bfloat16 or float16.
        k: [S, N, D], whole keys.
        k_pe: None, because the declarations ask for whole keys.
        v: [S, N, V], V at most D.
        cu_seqlens_q: [B + 1], first query token of each request.
        cu_seqlens_k: [B + 1], first key of each request; S may be larger than the last number.
        max_seqlen_q: upper bound of the query lengths.
        max_seqlen_k: upper bound of the key lengths.
        softmax_scale: factor of the scores.
        causal: if True, the last query of a request sees all keys, and each earlier query sees one key less than the
            query after it.
        out_dtype: dtype of the output.
        out: [T, N, V] in `out_dtype`, any strides, written in place; None allocates `out`.
        lse: [N, T], float32, written in place; None allocates `lse`, or leaves it out if `out` is given.

    Returns:
        out [T, N, V] and lse [N, T], natural log, float32; None in place of the LSE if only `out` is given. Rows
        without keys: output 0 and LSE -inf.
    """
    with_lse = out is None or lse is not None
    tokens, heads, dim = q.shape
    value = v.shape[2]
    if tokens == 0 or heads == 0 or k.shape[0] == 0:  # the libraries refuse empty tensors, or give LSE +inf
        out = q.new_zeros(tokens, heads, value, dtype=out_dtype) if out is None else out.zero_()
        if with_lse:
            lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device) if lse is None else lse
            lse.fill_(-torch.inf)
        return out, lse
    source, module = loaded(sources)
    q, k, v = in_words(q), in_words(k), in_words(pad_columns(v, _value_columns(version, dim, value)))
    direct = False  # whether the library writes into `out`
    if out is not None and source.module == VLLM and v.shape[2] == value:
        direct = out.dtype == q.dtype and is_in_words(out)
    made, made_lse = _call(
        version, source, module, q, k, v, cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(),
        max(max_seqlen_q, LEAST_QUERY_BOUND[version]), max_seqlen_k, softmax_scale, causal, out if direct else None,
    )  # fmt: skip
    return lawful_state(
        out if direct else made, made_lse if with_lse else None, CONVENTIONS[version], out_dtype, value, out, lse
    )


def _call(
    version: int, source: Source, module: ModuleType, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, causal: bool, out: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Call the library with the arguments of `source`; return its output and its LSE."""
    given = dict(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale, causal=causal,
    )  # fmt: skip
    if source.module == VLLM:
        given |= dict(return_softmax_lse=True, num_splits=1, out=out, fa_version=version)
    elif version == 2:  # this function never splits keys, because there are as many heads of keys as of queries
        given |= dict(return_attn_probs=True)
    elif version == 3:
        given |= dict(return_attn_probs=True, num_splits=1)
    else:
        given |= dict(return_lse=True, num_splits=1)
    made, lse, *_ = module.flash_attn_varlen_func(q, k, v, **given)
    return made, lse


def _value_columns(version: int, dim: int, value: int) -> int:
    """Return how many columns the values must have for keys of `dim` columns: `value`, or `dim` if they are padded."""
    if version == 3 and 128 < dim <= 192 and 96 < value <= 128 and value % 8 == 0:
        return value
    return value if version == 4 and (dim, value) == (192, 128) else dim


flash_attn_varlen_2 = functools.partial(_attend, 2, SOURCES_2)
flash_attn_varlen_4 = functools.partial(_attend, 4, SOURCES_4)


def flash_attn_varlen_3(q: Tensor, *arguments, **options) -> tuple[Tensor, Tensor | None]:
    """Compute attention of packed requests with flash-attn 3 (`_attend`); only some sources have float16 kernels."""
    sources = SOURCES_3 if q.dtype == torch.bfloat16 else SOURCES_3_OF_ALL
    return _attend(3, sources, q, *arguments, **options)


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


def _prefill(launcher: str, dtypes: tuple[torch.dtype, ...], **declared) -> dict[str, OpSupport]:
    """Declare `flash_attn_varlen` of one version."""
    return {
        "flash_attn_varlen": OpSupport(
            f"{__name__}:{launcher}",
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
    """Declare the three ops of a decode whose schedule the library makes; `declared` describes `mla_decode`."""
    shared = {"priority": -100, "dtypes": declared["dtypes"], "cache_formats": declared["cache_formats"],
              "fp8_modes": declared["fp8_modes"], "head_dims": declared["head_dims"],
              "block_sizes": declared["block_sizes"]}  # fmt: skip
    return {
        "mla_decode": OpSupport(launcher, priority=-100, masks=("causal",), **declared),
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
    dtypes=HALF,
    out_dtypes=STATE_DTYPES,
    cache_formats=("compute_dtype",),
    fp8_modes=("converted",),
    head_dims={"kv_lora_rank": (512,), "qk_rope_head_dim": (64,)},
    block_sizes=(16, 32, 64, 128),
    batch_invariant=False,  # the kernel's tiles depend on the longest query of the batch
    query_lens=QueryLenSupport.VARLEN,
    needs_words=True,
)  # fmt: skip

FLASH_ATTN_2 = Backend(
    name="flash_attn_2",
    priority=-5,
    device_type="cuda",
    ops=_prefill("flash_attn_varlen_2", HALF) | gqa_ops(2),
    capability=(8, 0),
    missing_package=missing_package(SOURCES_2),
    library="flash-attn 2",
    install="pip install flash-attn, or pip install vllm",
    missing_artifacts=f"{__name__}:missing_2",
)
FLASH_ATTN_3 = Backend(
    name="flash_attn_3",
    priority=-5,
    device_type="cuda",
    ops=_prefill("flash_attn_varlen_3", HALF[:1] if _only_fa3_fwd() else HALF, mixes_nan=True, priority=30)
    | _DECODE_3
    | gqa_ops(3),
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
    ops=_prefill("flash_attn_varlen_4", HALF, mixes_nan=True, batch_invariant=False),
    capability=(9, 0),
    capability_end=(12, 0),
    missing_package=missing_package(SOURCES_4),
    library="flash-attn 4",
    install="pip install flash-attn-4",
    missing_artifacts=f"{__name__}:missing_4",
    only_named=True,
)
