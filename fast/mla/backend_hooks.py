"""What a backend may do besides launching its ops: prepare the plans of a builder, and run the two steps of a prefill.

A library may need more than the arguments of one call. For example, it makes a schedule once in a step, or keeps a
workspace for all layers. The `Backend` then names a subclass of `BackendHooks` in its field `hooks`. All other
backends, the backends of this package too, have the methods of `BackendHooks` itself.

`MLAMetadataBuilder` calls the hooks of the backends that a plan names, in this order. Plans of `build_mla_metadata`
name no backend and call no hooks.

1. `create_builder_state`, once for each backend and device.
2. `post_process_prefill_metadata`, in steps with prefills, with the prefill part of the plan. It may return a subclass
   of `PrefillMetadata`, which holds what the other methods need.
3. `finalize_metadata`, with the whole plan. The method of a decode backend can add tensors that the backend's decode
   needs (`DecodeMetadata.prepared`). Plans for CUDA graphs call this method too: the tensors then must have the same
   shapes for every batch of the graph, because `update_captured` copies new values into them.

Each layer of the step then calls `run_prefill_new_tokens`, and `run_prefill_context_chunk` for each chunk of context.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from reference.interfaces import (
    AttentionState,
    CacheFormat,
    ContextChunk,
    MLAConfig,
    MLAMetadata,
    PrefillMetadata,
    UnsupportedConfiguration,
    check,
    check_type,
    wide_dtype,
)
from reference.interfaces.support import constant_when_traced

from .. import backends
from ..attention.varlen import AttentionInputs, attend
from ..backends import BackendChoice
from ..backends.error_texts import in_one_line
from ..backends.selection import named

_ATTENTION = ("run_prefill_new_tokens", "run_prefill_context_chunk")


class BackendHooks:
    """The methods of a backend without hooks of its own.

    Args:
        backend: name of the backend. A direct call of a prefill, whose plan names no backend, may also have a mapping
            from op to name, or None.

    Attributes:
        runs_attention: whether the class has its own `run_prefill_new_tokens` or `run_prefill_context_chunk`, whose
            results must be checked.
        options: mapping from the name of an option to a function that checks its value. A builder takes the values by
            `backend_options`, and passes them to `create_builder_state` as keyword arguments. The function gets the
            name for its error, and the value.
    """

    runs_attention = False
    options: Mapping[str, Callable[[str, Any], None]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = [getattr(BackendHooks, name) is not getattr(cls, name) for name in _ATTENTION]
        cls.runs_attention = any(own)

    def __init__(self, backend: BackendChoice):
        self.backend = backend

    def create_builder_state(
        self, config: MLAConfig, cache_format: CacheFormat, layer_names: tuple[str, ...], device: torch.device
    ) -> Any:
        """Return what the backend keeps for the plans of one builder, such as a workspace; None if nothing.

        Args:
            config: config of the builder's layers. Under context parallelism, `num_heads` is the number of gathered
                heads for a decode backend, and the number of heads of one rank for a prefill backend.
            cache_format: format of their caches.
            layer_names: names of the layers; empty if the builder was not given any.
            device: device of the plans.

        A subclass with `options` also has a keyword argument with a default for each option.
        """
        return None

    def post_process_prefill_metadata(
        self, prefill: PrefillMetadata, state: Any, query_start_loc: Tensor
    ) -> PrefillMetadata:
        """Return the prefill part of a plan, which the backend may change or replace by an object of a subclass.

        A subclass must be a `dataclass(frozen=True, eq=False)` like `PrefillMetadata`, and keep the field `backend`.

        Args:
            prefill: prefill part of the plan. `prefill.parts` contains plans of some of its requests, for which the
                backend is called too.
            state: result of `create_builder_state`.
            query_start_loc: [B + 1], prefix sum of the query lengths of the prefills, on the device.
        """
        return prefill

    def finalize_metadata(self, metadata: MLAMetadata, state: Any) -> MLAMetadata:
        """Return the plan of a step, which the backend may change, for example to add a schedule of its library.

        Args:
            metadata: the plan, with the result of `post_process_prefill_metadata`, and with its schedule or cascade.
            state: result of `create_builder_state`.
        """
        return metadata

    def run_prefill_new_tokens(
        self, inputs: AttentionInputs, metadata: PrefillMetadata, softmax_scale: float, out_dtype: torch.dtype,
        return_lse: bool, out: Tensor | None, out_is_checked: bool,
    ) -> AttentionState | Tensor:  # fmt: skip
        """Compute causal attention of the new tokens of each request over the new tokens of the same request.

        Args:
            inputs: queries, keys and values of the new tokens, with the offsets of the requests. The keys are whole
                (`inputs.k_pe` is None) if the backend declares whole keys and the expansion wrote them so.
            metadata: prefill part of the plan.
            softmax_scale: factor of the scores.
            out_dtype: dtype of the output.
            return_lse: whether the result is an `AttentionState`, or the output alone.
            out: tensor [T, N, V] that receives the output and is returned; None allocates a tensor.
            out_is_checked: whether the caller has checked `out`.
        """
        longest = metadata.max_query_len
        return attend(
            inputs, longest, longest, softmax_scale, True, out_dtype, self.backend, return_lse=return_lse, out=out,
            out_is_checked=out_is_checked, batch_invariant=metadata.batch_invariant,
        )  # fmt: skip

    def run_prefill_context_chunk(
        self, inputs: AttentionInputs, metadata: PrefillMetadata, chunk: ContextChunk, softmax_scale: float
    ) -> AttentionState:
        """Compute unmasked attention of the new tokens over one chunk of the cached context.

        Args:
            inputs: queries, keys and values of the chunk's run (`chunk.run`), with the offsets of its requests. Without
                a run, these are the queries of all requests.
            metadata: prefill part of the plan, with all requests.
            chunk: the chunk.
            softmax_scale: factor of the scores.

        Returns:
            out [T, N, V] and lse [N, T] for the T given queries, both in float32 (float64 if the queries are float64).
        """
        longest = metadata.max_query_len if chunk.run is None else chunk.run.max_query_len
        return attend(
            inputs, longest, chunk.max_seq_len, softmax_scale, False, wide_dtype(inputs.q.dtype), self.backend,
            bounded=chunk.bounded, batch_invariant=metadata.batch_invariant,
        )  # fmt: skip


class BuilderStates:
    """The results of `create_builder_state` of one builder, each made when a plan first needs it.

    Args:
        cache_format: format of the caches.
        layer_names: names of the layers.
        options: mapping from the name of a backend to its options, a mapping from name to value.

    Attributes:
        made: the results, by hooks, device and config.

    Raises:
        TypeError: `options` is not a mapping of mappings, or a value has a wrong type.
        ValueError: no backend has a name, a backend has no such option, or a value is invalid.
    """

    def __init__(
        self, cache_format: CacheFormat, layer_names: tuple[str, ...], options: Mapping[str, Mapping[str, Any]] | None
    ):
        check_type("layer_names", layer_names, tuple, "a tuple of names")
        for number, each in enumerate(layer_names):
            check_type(f"layer_names[{number}]", each, str)
        check_type("backend_options", options, (Mapping, type(None)), "a mapping from backend to its options, or None")
        self._cache_format, self._layer_names = cache_format, layer_names
        self._options: dict[str, dict[str, Any]] = {}
        self.made: dict[tuple[BackendHooks, torch.device, MLAConfig], Any] = {}
        for name, given in ({} if options is None else options).items():
            argument = f"backend_options[{name!r}]"
            known = hooks_of(named(name, "backend_options").name).options
            check_type(argument, given, Mapping, "a mapping from option to value")
            for option, value in given.items():
                check(option in known, argument, f"options among {', '.join(known) or 'none'}", option)
                known[option](f"{argument}[{option!r}]", value)
            self._options[name] = dict(given)

    def of(self, hooks: BackendHooks, device: torch.device, config: MLAConfig) -> Any:
        """Return what the hooks of a backend keep for the builder.

        Args:
            hooks: the hooks.
            device: device of the plans.
            config: under context parallelism, the config with the gathered heads for a decode backend, and the config
                with the heads of one rank for a prefill backend.
        """
        key = hooks, device, config
        if key not in self.made:
            options = self._options.get(hooks.backend, {})
            self.made[key] = hooks.create_builder_state(
                config, self._cache_format, self._layer_names, device, **options
            )
        return self.made[key]


@constant_when_traced
def declared_hooks(name: str) -> type | None:
    """Return the class of the hooks that a registered backend declares; None if it declares no hooks.

    Raises:
        UnsupportedConfiguration: the hooks cannot be imported from their path.
    """
    given = named(name, "metadata.prefill.backend").hooks
    if not isinstance(given, str):
        return given
    try:
        return backends.imported(given)
    except Exception as error:
        raise UnsupportedConfiguration([f"{name}: cannot import its hooks {given}: {in_one_line(error)}"]) from error


@functools.cache  # `torch.compile` traces this function without its cache
def hooks_of(name: str) -> BackendHooks:
    """Return the hooks of a registered backend; a change of the registry empties the cache."""
    declared = declared_hooks(name)
    hooks = BackendHooks(name) if declared is None else declared(name)
    check_type(f"hooks of the backend {name}", hooks, BackendHooks)
    return hooks


backends.on_change(hooks_of.cache_clear)
