"""The declaration of one op of a backend: all calls that a kernel can serve, and why it cannot serve another call."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from reference.interfaces import (
    COMPUTE_FORMAT,
    CONVERTED,
    FLOAT_DTYPES,
    VISIBLE_LENS,
    GraphSupport,
    QueryLenSupport,
    check,
    check_flag,
    check_fp8_mode,
    check_int,
    check_type,
)
from reference.interfaces import cache_format as formats

from .error_texts import most_similar, visible
from .kernel_request import GQA_OPS, HEAD_DIMS, MASKS, OPS, KernelRequest, check_features


@dataclass(frozen=True)
class OpSupport:
    """The declaration of one op of a backend: all calls of the op that the backend can serve.

    Attributes:
        launcher: the function that launches the kernel, or its dotted path "package.module:function". A path is
            imported when the op is called for the first time, so that a declaration imports no kernel.
        dtypes: supported dtypes of queries and keys.
        out_dtypes: supported dtypes of the output, if a caller may choose the dtype; None means the same as `dtypes`.
        cache_formats: names of the supported cache formats.
        head_dims: mapping from the name of a width (`KernelRequest.head_dims`) to its supported sizes. A width that is
            missing in the mapping may have any size. None means that every width may have any size.
        block_sizes: supported block sizes; None for any.
        batch_invariant: whether the kernel can be batch-invariant (`KernelRequest.batch_invariant`).
        invariant_on_request: whether the launcher of `flash_attn_varlen` must get `batch_invariant=True` for this.
        query_lens: the most general supported kind of query lengths.
        masks: supported masks, from `MASKS`. A decode with "visible_lens" reads the number of keys that each query
            token sees, and so serves every mask. A launcher of `mla_decode` with "causal_over_ranks" and without
            "visible_lens" gets `total_seq_lens` and `ownership` of a plan (`DecodeMetadata`) as keyword arguments if
            the plan promises "causal_over_ranks". For all other plans, it does not get these arguments.
        graph: the most general supported kind of CUDA graph.
        lse: whether the kernel returns the LSE; not used for an op without an LSE.
        same_out_dtype: whether the output always has the dtype of the queries; `out_dtypes` is then not used.
        whole_keys: whether the kernel needs each key in one tensor. Otherwise it also takes keys in two parts: one part
            of each head, and a rope part that all heads share. Only for `flash_attn_varlen`.
        narrow_values: whether values may not be wider than keys. Only for `flash_attn_varlen`.
        mixes_nan: whether a NaN or an infinity in a value of one request may reach the output of another request of the
            batch. The kernels of this package never do this. Only for `flash_attn_varlen` and `gqa_varlen_attention`.
        needs_words: whether the cache must consist of 16-byte words (`KernelRequest.cache_in_words`).
        reads: for an op that writes a message for other ranks: name of the op that reads the message. The backend must
            declare this reading op too. None for all other ops.
        priority: priority for this op; None for the priority of the backend.
        only_named: whether the backend serves this op only for calls that name the backend (`Backend.only_named`).
        plans_steps: whether a call that no builder has planned waits for the GPU and plans anew. An automatic choice
            takes this backend only for planned calls.
        family_priorities: mapping from a family of devices to the priority for this op on such a device, in place of
            `priority`. A family is "9.x" for all GPUs of compute capability 9, and so on.
        fp8_modes: supported modes of a decode over a cache in e4m3, from `FP8_MODES`. An op of grouped-query attention
            gets queries in the dtype of the model; in the mode "fp8_query" it rounds them to e4m3 first.
        format_modes: mapping from the name of a cache format to the modes of `fp8_modes` that the kernel supports over
            this format. A format that is missing in the mapping may have any mode of `fp8_modes`.
        head_scales: whether queries in e4m3 may have one scale for each head (`KernelRequest.head_scales`).
        features: supported features of grouped-query attention, from `FEATURES`. A kernel without "scales" ignores the
            scales of a cache. It serves only calls that name its backend, and raises if a scale is not 1.
        schedule_programs: for `gqa_paged_attention`: function, or its dotted path, that returns how many programs a
            schedule should have. Its arguments are device, dtype of the queries, N, Nkv, Dh, block size, length of the
            longest query, and cache format. None means that the kernel ignores schedules.
        cache_reasons: for `gqa_paged_attention`: function, or its dotted path, that returns why the kernel cannot read
            a cache with such strides, as a list of texts. Its argument is the cache. A layer asks before it writes.
        kept_call: function, or its dotted path, that gets the arguments of a call of the launcher, and returns a
            function with the same arguments and results for later calls with equal shapes, strides, dtypes, devices,
            alignments and other values (`fast.backends.kept_calls`). None calls the launcher each time. Only for
            `flash_attn_varlen` and `mla_decode`. If the attribute `allocates` of a function of `flash_attn_varlen` is
            True, a function for calls with `out` and without an LSE also serves such calls with `out=None`: it
            allocates the output, and returns None in place of the LSE.
        one_set_of_parameters: whether the backend plans the op once for all layers of a step, so that they must have
            the same window, soft cap, scale and so on. `check_one_set_of_parameters` refuses a model whose layers
            differ.
    """

    launcher: str | Callable
    dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES
    out_dtypes: tuple[torch.dtype, ...] | None = None
    cache_formats: tuple[str, ...] = (COMPUTE_FORMAT.name,)
    head_dims: Mapping[str, tuple[int, ...]] | None = None
    block_sizes: tuple[int, ...] | None = None
    batch_invariant: bool = True
    invariant_on_request: bool = False
    query_lens: QueryLenSupport = QueryLenSupport.VARLEN
    masks: tuple[str, ...] = MASKS
    graph: GraphSupport = GraphSupport.ANY
    lse: bool = True
    same_out_dtype: bool = False
    whole_keys: bool = False
    narrow_values: bool = False
    mixes_nan: bool = False
    needs_words: bool = False
    reads: str | None = None
    priority: int | None = None
    only_named: bool = False
    plans_steps: bool = False
    family_priorities: Mapping[str, int] = field(default_factory=dict)
    fp8_modes: tuple[str, ...] = (CONVERTED,)
    format_modes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    head_scales: bool = True
    features: tuple[str, ...] = ()
    schedule_programs: str | Callable | None = None
    cache_reasons: str | Callable | None = None
    kept_call: str | Callable | None = None
    one_set_of_parameters: bool = False

    def __post_init__(self):
        for name in ("launcher", "schedule_programs", "cache_reasons", "kept_call"):
            value = getattr(self, name)
            path = isinstance(value, str) and re.fullmatch(r"[\w.]+:\w+", value)
            missing = value is None and name != "launcher"
            check(bool(path) or callable(value) or missing, name, 'a function or "package.module:function"', value)
        for name in ("dtypes", "cache_formats", "masks", "fp8_modes"):
            check_type(name, getattr(self, name), tuple, "a tuple")
        for name in ("out_dtypes", "block_sizes"):
            check_type(name, getattr(self, name), (tuple, type(None)), "a tuple or None")
        for name in ("dtypes", "out_dtypes"):
            given = getattr(self, name)
            dtypes = given is None or all(isinstance(each, torch.dtype) for each in given)
            check(dtypes, name, "a tuple of torch.dtype", given)
        known = formats.CACHE_FORMATS
        for each in self.cache_formats:
            check(isinstance(each, str) and each in known, "cache_formats", f"names among {', '.join(known)}", each)
        for each in self.block_sizes or ():
            check_int("block_sizes", each, 1, "positive ints")
        check_type("head_dims", self.head_dims, (Mapping, type(None)), "a mapping from name to sizes, or None")
        unknown = [str(each) for each in self.head_dims or () if each not in HEAD_DIMS]
        check(not unknown, "head_dims", f"names among {', '.join(HEAD_DIMS)}", ", ".join(sorted(unknown)))
        for name, sizes in (self.head_dims or {}).items():
            check_type(f"head_dims[{name!r}]", sizes, tuple, "a tuple of sizes")
            for size in sizes:
                check_int(f"head_dims[{name!r}]", size, 0, "ints >= 0")
        for mode in self.fp8_modes:
            check_fp8_mode(mode, "fp8_modes")
        check_type("format_modes", self.format_modes, Mapping, "a mapping from cache format to fp8 modes")
        for name, modes in self.format_modes.items():
            check(name in self.cache_formats, "format_modes", f"formats among {', '.join(self.cache_formats)}", name)
            check_type(f"format_modes[{name!r}]", modes, tuple, "a tuple of fp8 modes")
            check(
                all(each in self.fp8_modes for each in modes),
                f"format_modes[{name!r}]",
                f"some of {self.fp8_modes}",
                modes,
            )
        check_features("features", self.features)
        check(all(each in MASKS for each in self.masks), "masks", f"some of {', '.join(MASKS)}", self.masks)
        for name in ("batch_invariant", "invariant_on_request", "lse", "needs_words", "same_out_dtype", "whole_keys",
                     "narrow_values", "mixes_nan", "one_set_of_parameters", "only_named", "head_scales",
                     "plans_steps"):  # fmt: skip
            check_flag(name, getattr(self, name))
        check_type("query_lens", self.query_lens, QueryLenSupport)
        check_type("graph", self.graph, GraphSupport)
        check_type("reads", self.reads, (str, type(None)), "the name of an op or None")
        if self.reads is not None:
            check_op("reads", self.reads)
        if self.priority is not None:
            check_int("priority", self.priority, -(2**31), "an int or None")
        check_type("family_priorities", self.family_priorities, Mapping, "a mapping from family to priority")
        for family, priority in self.family_priorities.items():
            check(isinstance(family, str) and re.fullmatch(r"\d+\.x", family) is not None, "family_priorities",
                  'families such as "9.x"', family)  # fmt: skip
            check_int(f"family_priorities[{family!r}]", priority, -(2**31), "an int")

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        """Return whether the kernel serves queries and keys of a dtype."""
        return dtype in self.dtypes

    def serves_mask(self, mask: str) -> bool:
        """Return whether the kernel serves decodes whose plan promises a mask; a kernel for VISIBLE_LENS serves all."""
        return mask in self.masks or VISIBLE_LENS in self.masks

    def reasons(self, request: KernelRequest) -> list[str]:
        """Return every reason why the kernel cannot serve `request`; the texts do not name the backend."""
        found = []
        if request.dtype is not None and not self.supports_dtype(request.dtype):
            found.append(f"serves {', '.join(map(str, self.dtypes))}, got {request.dtype}")
        out_dtypes = self.dtypes if self.out_dtypes is None else self.out_dtypes
        if self.same_out_dtype:
            out_dtypes = (request.dtype,)
        if request.out_dtype is not None and request.out_dtype not in out_dtypes:
            found.append(f"writes {', '.join(map(str, out_dtypes))}, got {request.out_dtype}")
        if request.cache_format is not None and request.cache_format.name not in self.cache_formats:
            found.append(f"reads caches in {', '.join(self.cache_formats)}, got {request.cache_format.name}")
        for dim, size in request.head_dims:
            allowed = None if self.head_dims is None else self.head_dims.get(dim)
            if allowed is not None and size not in allowed:
                found.append(f"serves {dim} in {allowed}, got {size}")
        widths = dict(request.head_dims)
        if self.narrow_values and widths.get("v_head_dim", 0) > widths.get("qk_head_dim", 0):
            found.append(f"serves values that are not wider than keys, got {widths['v_head_dim']} columns")
        if self.block_sizes is not None and request.block_size not in (None, *self.block_sizes):
            found.append(f"serves block sizes {self.block_sizes}, got {request.block_size}")
        if self.needs_words and not request.cache_in_words:
            found.append("needs a cache of whole, aligned 16-byte words, with at least one block")
        if not self.query_lens.covers(request.query_lens):
            found.append(f"serves {self.query_lens.value} query lengths, got {request.query_lens.value}")
        if request.mask is not None and not self.serves_mask(request.mask):
            found.append(f"applies the masks {', '.join(self.masks) or 'none'}, got {request.mask}")
        if request.fp8_mode not in self.fp8_modes:
            found.append(f"decodes in the fp8 modes {', '.join(self.fp8_modes)}, got {request.fp8_mode}")
        elif request.cache_format is not None:
            modes = self.format_modes.get(request.cache_format.name, self.fp8_modes)
            if request.fp8_mode not in modes:
                found.append(f"decodes caches in {request.cache_format.name} in the fp8 modes {', '.join(modes)}, got "
                             f"{request.fp8_mode}")  # fmt: skip
        if request.head_scales and not self.head_scales:
            found.append("serves one scale for all queries, got one scale for each head")
        if missing := [feature for feature in request.features if feature not in self.features]:
            found.append(f"has no {', '.join(missing)}")
        if request.batch_invariant and not self.batch_invariant:
            found.append("is not batch-invariant")
        if request.lse and not self.lse:
            found.append("returns no LSE")
        if not self.graph.covers(request.graph):
            found.append(f"has graph support '{self.graph.value}', got a call that needs '{request.graph.value}'")
        return found


def check_op(argument: str, op: object) -> None:
    """Check that an op with this name exists; the error also has the most similar name, if one is similar."""
    known = sorted({*OPS, *GQA_OPS})
    check(op in known, argument, f"ops among {', '.join(known)}{most_similar(op, known)}", visible(op))
