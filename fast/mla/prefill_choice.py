"""Choose the backend for the attention of a step's prefills, and check that it can serve the step of a layer.

One backend serves all calls of a step. So the choice must know every call that `forward_prefill` makes: requests with
context need the LSE and an output in float32, and requests without context need the output alone, in the dtype of the
layer.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from reference.interfaces import (
    MLAConfig,
    PrefillMetadata,
    QueryLenSupport,
    UnsupportedConfiguration,
    wide_dtype,
)

from ..backends import AttentionSizes, BackendChoice, KernelRequest, on_change, select_for_all
from ..backends.selection import check_same_backend, name_for, named, reasons_against

OP = "flash_attn_varlen"


def prefill_requests(
    prefill: PrefillMetadata,
    config: MLAConfig,
    dtype: torch.dtype,
    in_e4m3: bool = False,
    batch_invariant: bool = False,
) -> tuple[KernelRequest, ...]:
    """Return a request for each kind of call that `forward_prefill` makes for a plan, and for each chunk of context.

    Args:
        prefill: prefill part of the plan.
        config: config of the layer.
        dtype: dtype of queries and keys.
        in_e4m3: whether the output of the layer is quantised to e4m3, after attention has computed it in float32.
        batch_invariant: whether the other requests of the step must not change the result of a request. The requests
            then have no sizes, because a choice by the sizes of the step would depend on the other requests.
    """
    has_context = {bool(part.rows) for part in prefill.parts} or {bool(prefill.context_chunks)}
    widths = (("qk_head_dim", config.qk_head_dim), ("v_head_dim", config.v_head_dim))

    def request(needs_lse: bool, causal: bool, longest_key: int) -> KernelRequest:
        longest = prefill.max_query_len, longest_key
        sizes = AttentionSizes.rounded(prefill.block_table.shape[0], config.num_heads, *longest)
        return KernelRequest(
            OP,
            prefill.query_start_loc.device,
            dtype,
            widths,
            query_lens=QueryLenSupport.VARLEN,
            out_dtype=wide_dtype(dtype) if needs_lse or in_e4m3 else dtype,
            mask="causal" if causal else None,
            lse=needs_lse,
            batch_invariant=batch_invariant,
            sizes=None if batch_invariant else sizes,
        )

    new_tokens = [request(needs_lse, True, prefill.max_query_len) for needs_lse in sorted(has_context)]
    return (*new_tokens, *(request(True, False, chunk.max_seq_len) for chunk in prefill.context_chunks))


def _every_kind(requests: tuple[KernelRequest, ...]) -> tuple[KernelRequest, ...]:
    """Return a request for each kind of call that any step of the same builder may make; `requests` are those of one.

    If a builder is batch-invariant, an automatic choice must find the same backend in a step with context and in a step
    without: whether a step has context depends on the other requests.
    """
    one = requests[0]
    wide = dataclasses.replace(one, out_dtype=wide_dtype(one.dtype), lse=True)
    alone = dataclasses.replace(one, out_dtype=one.dtype, lse=False)
    return tuple(dataclasses.replace(each, mask=mask) for each, mask in (
        (alone, "causal"), (wide, "causal"), (wide, None),
    ))  # fmt: skip


def choose_prefill_backend(
    prefill: PrefillMetadata,
    config: MLAConfig,
    dtype: torch.dtype,
    backend: BackendChoice,
    batch_invariant: bool = False,
) -> str:
    """Return the name of the backend that serves all calls of a step's prefills.

    Args:
        prefill: prefill part of the plan.
        config: config of the layers.
        dtype: dtype of queries and keys.
        backend: a name, a mapping from op to name, or None.
        batch_invariant: whether the other requests of the step must not change the result of a request.

    Raises:
        UnsupportedConfiguration: no backend that `backend` allows can serve all of these calls.
    """
    requests, name = prefill_requests(prefill, config, dtype, False, batch_invariant), name_for(OP, backend)
    return _choose(_every_kind(requests) if batch_invariant and name is None else requests, name)


def with_backend(prefill: PrefillMetadata, name: str, batch_invariant: bool | None = None) -> PrefillMetadata:
    """Return the prefill part of a plan, and the plans of its parts, with the name of the backend of its attention.

    `batch_invariant` is a new value for this flag of all these plans; None keeps the flag.
    """
    flag = prefill.batch_invariant if batch_invariant is None else batch_invariant
    changed = {"backend": name, "batch_invariant": flag}
    parts = tuple(dataclasses.replace(part, plan=dataclasses.replace(part.plan, **changed)) for part in prefill.parts)
    return dataclasses.replace(prefill, parts=parts, **changed)


def check_invariant_prefills(backend: BackendChoice, batch_invariant: bool) -> None:
    """Check that the backend that is named for prefills can be batch-invariant, if `batch_invariant` is True.

    A backend may add conditions that depend on the device. `choose_prefill_backend` checks them for each step.

    Args:
        backend: a name, a mapping from op to name, or None.
        batch_invariant: whether the other requests of a step must not change the result of a request.

    Raises:
        UnsupportedConfiguration: the named backend declares that it is not batch-invariant.
    """
    name = name_for(OP, backend)
    if batch_invariant and name is not None and not named(name).ops[OP].batch_invariant:
        raise UnsupportedConfiguration([f"{name}: is not batch-invariant"])


@functools.lru_cache(maxsize=1024)
def _choose(requests: tuple[KernelRequest, ...], name: str | None) -> str:
    """Return `select_for_all(requests, name).name`."""
    return select_for_all(requests, name).name


on_change(_choose.cache_clear)


def check_prefill_backend(
    prefill: PrefillMetadata, config: MLAConfig, dtype: torch.dtype, backend: BackendChoice, in_e4m3: bool
) -> None:
    """Check that the backend that a plan names can serve a layer's step; accept a plan without such a name.

    Args:
        prefill: prefill part of the plan.
        config: config of the layer.
        dtype: dtype of the layer.
        backend: backend of the layer: a name, a mapping from op to name, or None.
        in_e4m3: whether the output of the layer is quantised to e4m3.

    Raises:
        ValueError: the layer is bound to another backend, or no backend has the name.
        UnsupportedConfiguration: the backend cannot serve the dtype of the layer, or an output in e4m3.
    """
    if prefill.backend is None:
        return
    check_same_backend(OP, prefill.backend, backend, "metadata.prefill.backend", "the backend of the layer")
    chosen = named(prefill.backend, "metadata.prefill.backend")
    requests = prefill_requests(prefill, config, dtype, in_e4m3, prefill.batch_invariant)
    reasons = [reason for request in requests for reason in reasons_against(chosen, request, True)]
    if reasons:
        raise UnsupportedConfiguration([f"metadata.prefill.backend: {reason}" for reason in dict.fromkeys(reasons)])
