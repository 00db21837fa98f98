"""Choose the backend for the attention of a step's prefills, and check that it can serve the step of a layer.

One backend serves all calls of a step. So the choice must know every call that `forward_prefill` makes: requests with
context need the LSE and an output in float32, and requests without context need the output alone, in the dtype of the
layer.
"""

from __future__ import annotations

import functools

import torch

from reference.interfaces import (
    MLAConfig,
    PrefillMetadata,
    QueryLenSupport,
    UnsupportedConfiguration,
    check,
    wide_dtype,
)

from ..backends import BackendChoice, KernelRequest, on_change, select_for_all
from ..backends.selection import name_for, named

OP = "flash_attn_varlen"


def prefill_requests(
    prefill: PrefillMetadata, config: MLAConfig, dtype: torch.dtype, in_e4m3: bool = False
) -> tuple[KernelRequest, ...]:
    """Return a request for each kind of call that `forward_prefill` makes for a plan.

    Args:
        prefill: prefill part of the plan.
        config: config of the layer.
        dtype: dtype of queries and keys.
        in_e4m3: whether the output of the layer is quantised to e4m3, after attention has computed it in float32.
    """
    has_context = {bool(part.rows) for part in prefill.parts} or {bool(prefill.context_chunks)}
    widths = (("qk_head_dim", config.qk_head_dim), ("v_head_dim", config.v_head_dim))
    return tuple(
        KernelRequest(
            OP,
            prefill.query_start_loc.device,
            dtype,
            widths,
            query_lens=QueryLenSupport.VARLEN,
            out_dtype=wide_dtype(dtype) if needs_lse or in_e4m3 else dtype,
            mask="causal",
            lse=needs_lse,
        )
        for needs_lse in sorted(has_context)
    )


def choose_prefill_backend(
    prefill: PrefillMetadata, config: MLAConfig, dtype: torch.dtype, backend: BackendChoice
) -> str:
    """Return the name of the backend that serves all calls of a step's prefills.

    Args:
        prefill: prefill part of the plan.
        config: config of the layers.
        dtype: dtype of queries and keys.
        backend: a name, a mapping from op to name, or None.

    Raises:
        UnsupportedConfiguration: no backend that `backend` allows can serve all of these calls.
    """
    return _choose(prefill_requests(prefill, config, dtype), name_for(OP, backend))


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
    check_same_backend(prefill, backend, "metadata.prefill", "the backend of the layer")
    chosen = named(prefill.backend, "metadata.prefill.backend")
    requests = prefill_requests(prefill, config, dtype, in_e4m3)
    reasons = [reason for request in requests for reason in chosen.validate_configuration(request)]
    if reasons:
        raise UnsupportedConfiguration([f"metadata.prefill.backend: {reason}" for reason in dict.fromkeys(reasons)])


def check_same_backend(metadata: PrefillMetadata, backend: BackendChoice, argument: str, whose: str) -> None:
    """Raise ValueError if `backend` binds the attention of a prefill to another backend than the plan names.

    Args:
        metadata: prefill part of the plan.
        backend: a name, a mapping from op to name, or None.
        argument: name of `metadata`, for the error.
        whose: whose backend `backend` is, for the error.
    """
    if metadata.backend is not None:
        bound = name_for(OP, backend)
        if bound not in (None, metadata.backend):
            named(bound)
            check(False, f"{argument}.backend", f"{bound}, {whose}", metadata.backend)
