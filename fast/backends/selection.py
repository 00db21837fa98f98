"""Choose the backend that serves a call, and find the backend of each op from one argument `backend=`.

In this module a request is a `KernelRequest`: the properties of one call that a backend must support.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping

import torch

from reference.interfaces import (
    COMPUTE_FORMAT,
    CONVERTED,
    VISIBLE_LENS,
    CacheFormat,
    GraphSupport,
    QueryLenSupport,
    UnsupportedConfiguration,
    check,
    check_type,
)

from .error_texts import most_similar, visible
from .kernel_request import GQA_OPS, KernelRequest, check_request
from .measured import fastest
from .own import DECODES, MESSAGES
from .registry import Backend, by_priority, failed_entry_points, registered

BackendChoice = str | Mapping[str, str] | None  # a name, a mapping from op to name, or None
# The parts of a step that a layer of grouped-query attention attends in separate calls of one op. A mapping from op to
# name may have a part in the place of an op; it then binds the op in the calls of this part alone.
STEP_PARTS = {"gqa_decode": "gqa_paged_attention", "gqa_prefill": "gqa_paged_attention"}


def query_lens_of(num_tokens: int, num_requests: int, max_query_len: int) -> QueryLenSupport:
    """Return the kind of query lengths of a batch with `num_requests` requests and `num_tokens` query tokens.

    If the number of tokens is `num_requests` times `max_query_len`, every query has `max_query_len` tokens.
    """
    if num_tokens != num_requests * max_query_len:
        return QueryLenSupport.VARLEN
    return QueryLenSupport.SINGLE_ONLY if max_query_len <= 1 else QueryLenSupport.UNIFORM


def candidates(op: str, device: torch.device, backend: str | None) -> tuple[Backend, ...]:
    """Return the backends that may serve an op: the named backend, or those that may be chosen automatically.

    Raises:
        ValueError: no backend has that name.
    """
    return by_priority(op, device) if backend is None else (named(backend),)


def named(name: object, argument: str = "backend") -> Backend:
    """Return the backend with this name.

    Args:
        name: the name.
        argument: argument or environment variable that has this name, for the error.

    Raises:
        ValueError: no backend has that name; the message also has the most similar name, if one is similar, or the
            error of the entry point of this name.
    """
    found = next((candidate for candidate in registered() if candidate.name == name), None)
    if found is None:
        check(False, argument, _names_for(name), visible(name))
    return found


def _names_for(name: object) -> str:
    """Return what an error expects in place of an unknown name: all names, and the most similar name.

    If an entry point of this name has failed, its error takes the place of the most similar name.
    """
    names = [candidate.name for candidate in registered()]
    failed = [each.in_words for each in failed_entry_points() if each.name == name]
    return f"one of {', '.join(names)}" + (f" ({'; '.join(failed)})" if failed else most_similar(name, names))


def select(request: KernelRequest, backend: BackendChoice = None) -> Backend:
    """Return the backend that serves a request.

    Args:
        request: properties of the call.
        backend: a name, a mapping from op to name, or None. With None, or with a mapping without this op, the
            result is the backend with the highest priority that can serve the request.

    Raises:
        ValueError: no backend has that name, or the mapping is invalid (`bind`).
        UnsupportedConfiguration: no backend that `backend` allows can serve the request; the error lists all reasons.
    """
    check_request(request)
    return select_for_all((request,), backend)


def select_for_all(requests: tuple[KernelRequest, ...], backend: BackendChoice = None) -> Backend:
    """Return the backend that serves several requests for one op.

    For requests with sizes, an automatic choice takes the backend that was measured to be the fastest for such sizes
    (`fast.backends.measured`). Otherwise it takes the backend with the highest priority. For batch-invariant requests
    an automatic choice never takes a backend that mixes NaN (`OpSupport.mixes_nan`).

    Args:
        requests: properties of the calls; at least one request, all for the same op and device.
        backend: as in `select`.

    Raises:
        ValueError: as in `select`.
        UnsupportedConfiguration: no backend that `backend` allows can serve all requests.
    """
    op, device = requests[0].op, requests[0].device
    name = name_for(op, backend)
    tried = candidates(op, device, name)
    able, by_priority_alone = [], any(request.sizes is None for request in requests)
    only_by_name = {each.name: why for each in tried if name is None and (why := _why_only_by_name(each, requests))}
    for candidate in tried:
        if candidate.name in only_by_name:
            continue
        if op in candidate.ops and not any(candidate.validate_configuration(request) for request in requests):
            able.append(candidate)
            if by_priority_alone:
                break
    if able:
        chosen = fastest([candidate.name for candidate in able], requests)
        return next(candidate for candidate in able if candidate.name == chosen)
    found = [f"{each}: {why}; name it to use it" for each, why in only_by_name.items()]
    found += [
        reason
        for candidate in tried
        for request in requests
        for reason in reasons_against(candidate, request, name is not None)
    ]
    raise UnsupportedConfiguration(list(dict.fromkeys(found)))


def _why_only_by_name(candidate: Backend, requests: tuple[KernelRequest, ...]) -> str | None:
    """Return why an automatic choice must not take a backend that may serve the requests; None if it may take it."""
    support = candidate.ops.get(requests[0].op)
    if support is None:
        return None
    if support.plans_steps and any(request.direct for request in requests):
        return "would plan in each direct call"
    if support.mixes_nan and any(request.batch_invariant for request in requests):
        return "a NaN of one request may reach another request, which a batch-invariant call excludes"
    return None


def reasons_against(candidate: Backend, request: KernelRequest, is_named: bool = False) -> list[str]:
    """Return why a backend cannot serve a request.

    There is no reason against a backend that lacks the op, if the backend belongs to another library, or if all its ops
    belong to grouped-query attention alone.

    Args:
        candidate: the backend.
        request: properties of the call.
        is_named: whether the caller names the backend; the reasons are then never left out, and contain what the
            backend lacks on this machine.
    """
    apart = candidate.library is not None or candidate.ops.keys() <= set(GQA_OPS)
    if apart and request.op not in candidate.ops and not is_named:
        return []
    reasons = candidate.validate_configuration(request)
    if not is_named or not reasons:
        return reasons
    return list(dict.fromkeys([*[f"{candidate.name}: {each}" for each in candidate.missing_for(request)], *reasons]))


class BoundOps(dict):
    """A mapping from op to name that `bind` has checked, so that an op need not check the mapping again.

    Attributes:
        variables: for each op that the environment has bound: the name of the variable (`bind_with_environment`).
    """

    def __init__(self, *pairs: object):
        super().__init__(*pairs)
        self.variables: dict[str, str] = {}

    @functools.cached_property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The pairs (op, name), sorted; they identify the mapping in a signature (`fast.backends.checked_calls`)."""
        return tuple(sorted(self.items()))


def bind(backend: BackendChoice, ops: Iterable[str] | None = None) -> BoundOps | None:
    """Turn one `backend=` of several ops into a mapping from op to backend name (see `fast.backends`).

    Args:
        backend: a name, a mapping from op to name, or None. With a name, every op that this backend declares is bound.
        ops: the ops that are called; None for all ops.

    Returns:
        A mapping that can be passed as `backend=` of each op; None if `backend` is None.

    Raises:
        ValueError: `backend` has an unknown name, an unknown op, or two names for ops that one backend must serve.
        UnsupportedConfiguration: the named backend declares none of `ops`, or a mapping binds an op to a backend that
            does not declare this op.
    """
    if backend is None or isinstance(backend, BoundOps):
        return backend
    if isinstance(backend, str):
        declared = named(backend).ops
        used = all_ops() if ops is None else tuple(ops)
        if not any(op in declared for op in used):
            raise UnsupportedConfiguration([f"{backend}: has no kernel for {op}" for op in used])
        return BoundOps((op, backend) for op in declared)
    _check_mapping(backend)
    bound = BoundOps(backend)
    for together in (DECODES, MESSAGES):
        for name in {backend[op] for op in together if op in backend}:  # `_check_mapping` allows at most one name
            bound.update((op, name) for op in together if _has(name, op))
    return bound


def all_ops() -> list[str]:
    """Return the names of all ops that some backend declares, sorted."""
    return sorted({op for candidate in registered() for op in candidate.ops})


def for_part(bound: BoundOps | None, part: str) -> BoundOps | None:
    """Return the mapping with which a layer calls the ops of one part of a step.

    Args:
        bound: result of `bind`.
        part: a key of `STEP_PARTS`. If `bound` has this key, the result binds the op of the part to the same backend.
    """
    if bound is None or part not in bound:
        return bound
    op, found = STEP_PARTS[part], BoundOps(bound)
    found[op], found.variables = bound[part], dict(bound.variables)
    if part in bound.variables:
        found.variables[op] = bound.variables[part]
    else:
        found.variables.pop(op, None)
    return found


def labelled_by_part(op: str, label: str, bound: BoundOps | None) -> dict[str, BoundOps | None]:
    """Return the mappings with which a layer calls an op, by labels: one for each part of a step if they may differ.

    Args:
        op: name of the op.
        label: the label of all calls of the op, if the parts of a step do not differ.
        bound: result of `bind`.
    """
    parts = [part for part, served in STEP_PARTS.items() if served == op]
    if bound is None or bound.keys().isdisjoint(parts):
        return {label: bound}
    return {part: for_part(bound, part) for part in parts}


def refusals_of(request: KernelRequest, bound: BoundOps | None) -> list[str]:
    """Return why no backend that `bound` allows can serve a request in some part of a step; empty if one can."""
    found: list[str] = []
    for allowed in labelled_by_part(request.op, request.op, bound).values():
        try:
            select(request, allowed)
        except UnsupportedConfiguration as error:
            found += error.reasons
    return found


def _has(name: object, op: object = None) -> bool:
    """Return whether a backend of that name exists and, if an op or a part is given, declares this op."""
    op = STEP_PARTS.get(op, op)
    return any(each.name == name and (op is None or op in each.ops) for each in registered())


def _check_mapping(backend: object) -> None:
    """Raise if `backend` is not a mapping from op to name, or contains an unknown op or an unknown name."""
    if not isinstance(backend, Mapping):
        check(False, "backend", "None, a name or a mapping from op to name", type(backend).__name__)
    unserved = [(op, name) for op, name in backend.items() if not _has(name, op)]
    for op, name in unserved:
        known = sorted((*all_ops(), *STEP_PARTS))
        expected = f"a mapping whose keys are among {', '.join(known)}{most_similar(op, known)}"
        check(op in known, "backend", expected, visible(op))
        check(_has(name), f"backend[{op!r}]", _names_for(name), visible(name))
    if unserved:
        raise UnsupportedConfiguration([f"{name}: has no kernel for {STEP_PARTS.get(op, op)}" for op, name in unserved])
    for together in (DECODES, MESSAGES):
        names = sorted({backend[op] for op in together if op in backend})
        if len(names) > 1:
            check(False, "backend", f"one name for {', '.join(together)}", " and ".join(names))


def name_for(op: str, backend: BackendChoice) -> str | None:
    """Return the name of the backend to which `backend` binds an op; None if `backend` does not bind the op."""
    if backend is None or isinstance(backend, str):
        return backend
    return bind(backend).get(op)


def check_same_backend(op: str, planned: str | None, backend: BackendChoice, argument: str, whose: str) -> None:
    """Raise ValueError if `backend` binds an op to another backend than a plan names.

    Args:
        op: name of the op.
        planned: name of the backend in the plan; None if the plan names no backend.
        backend: a name, a mapping from op to name, or None.
        argument: name of the plan's field `backend`, for the error.
        whose: whose backend `backend` is, for the error.
    """
    if planned is not None:
        bound = name_for(op, backend)
        if bound not in (None, planned):
            named(bound)
            check(False, argument, f"{bound}, {whose}", planned)


def decode_request(
    device: torch.device,
    dtype: torch.dtype,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_size: int,
    query_lens: QueryLenSupport,
    cache_in_words: bool = True,
    op: str = "mla_decode",
    out_dtype: torch.dtype | None = None,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    batch_invariant: bool = False,
    graph: GraphSupport = GraphSupport.NONE,
    fp8_mode: str = CONVERTED,
    mask: str = VISIBLE_LENS,
    head_scales: bool = False,
) -> KernelRequest:
    """Return the request for a call of `mla_decode`, or of another op of `DECODES`, which has no mask."""
    return KernelRequest(
        op=op,
        device=device,
        dtype=dtype if fp8_mode == CONVERTED else None,
        head_dims=(("kv_lora_rank", kv_lora_rank), ("qk_rope_head_dim", qk_rope_head_dim)),
        block_size=block_size,
        query_lens=query_lens,
        cache_in_words=cache_in_words,
        out_dtype=out_dtype,
        cache_format=cache_format,
        batch_invariant=batch_invariant,
        graph=graph,
        mask=mask if op == "mla_decode" else None,
        lse=op == "mla_decode",
        fp8_mode=fp8_mode,
        head_scales=head_scales,
    )


def state_request(
    op: str, out: torch.Tensor, graph: GraphSupport = GraphSupport.NONE, out_dtype: torch.dtype | None = None
) -> KernelRequest:
    """Return the request for a call of an op on attention states.

    Args:
        op: name of the op.
        out: [T, N, Dv], output of a state.
        graph: kind of the CUDA graph that captures the call; NONE without a graph.
        out_dtype: dtype of the result; None if the backend need not declare this dtype.
    """
    check_type("graph", graph, GraphSupport)
    return KernelRequest(op, out.device, out.dtype, (("head_dim", out.shape[2]),), out_dtype=out_dtype, graph=graph)


def cache_request(
    op: str,
    kv_cache: torch.Tensor,
    head_dims: tuple[tuple[str, int], ...] | None = None,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    graph: GraphSupport = GraphSupport.NONE,
) -> KernelRequest:
    """Return the request for a call of an op on a paged cache.

    Args:
        op: name of the op.
        kv_cache: the cache, [num_blocks, block_size, columns].
        head_dims: widths of the op's tensors; None for an op that uses only the number of columns.
        cache_format: format of the cache.
        dtype: dtype of the numbers that the op writes to or reads from the cache; None means the dtype of the cache.
        out_dtype: dtype of the output; None for an op whose callers cannot choose the dtype.
        graph: kind of the CUDA graph that captures the call; NONE without a graph.
    """
    check_type("graph", graph, GraphSupport)
    widths = (("head_dim", kv_cache.shape[2]),) if head_dims is None else head_dims
    return KernelRequest(
        op, kv_cache.device, kv_cache.dtype if dtype is None else dtype, widths, block_size=kv_cache.shape[1],
        out_dtype=out_dtype, cache_format=cache_format, graph=graph,
    )  # fmt: skip


def copy_request(op: str, kv_cache: torch.Tensor, cache_format: CacheFormat | None = None) -> KernelRequest:
    """Return the request for a call of an op that copies whole cache entries, of any dtype.

    Args:
        op: name of the op.
        kv_cache: [num_blocks, block_size, columns], or a key/value cache [2, num_blocks, block_size, Nkv, Dh].
        cache_format: format of the cache; None for an op that copies entries of any format.
    """
    block_size, *entry = kv_cache.shape[1 if kv_cache.dim() == 3 else 2 :]
    return KernelRequest(
        op, kv_cache.device, head_dims=(("head_dim", math.prod(entry)),), block_size=block_size,
        cache_format=cache_format,
    )  # fmt: skip


def cache_in_words(kv_cache: torch.Tensor) -> bool:
    """Return `KernelRequest.cache_in_words` of a cache: whether TMA (the GPU's bulk copy engine) can read the cache.

    Args:
        kv_cache: [num_blocks, block_size, Lkv + R], any strides; bfloat16 or float16.
    """
    size = kv_cache.element_size()
    *outer, inner = kv_cache.stride()
    words = all(stride > 0 and stride * size % 16 == 0 for stride in outer)
    if not torch.compiler.is_compiling():  # a traced tensor has no offset; the launcher checks the address
        words = words and kv_cache.storage_offset() * size % 16 == 0
    return words and inner == 1 and kv_cache.numel() > 0
