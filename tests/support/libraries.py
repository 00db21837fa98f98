"""Import the unmodified Python of libraries whose compiled parts cannot run here, with recorders in their place.

A recorder has the schema of the compiled function. It keeps the arguments of each call, and returns what an oracle
computes from them. So a test sees which arguments reach the compiled part, and whether the adapter converts the result.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator

import torch

from fast.backends.adapters import sources

VLLM_FA2 = (
    "varlen_fwd(Tensor! q, Tensor k, Tensor v, Tensor!? out, Tensor cu_seqlens_q, Tensor cu_seqlens_k,"
    " Tensor? seqused_k, Tensor? leftpad_k, Tensor? block_table, Tensor? alibi_slopes, int max_seqlen_q,"
    " int max_seqlen_k,"
    " float p_dropout, float softmax_scale, bool zero_tensors, bool is_causal, int window_size_left,"
    " int window_size_right, float softcap, bool return_softmax, int num_splits, Tensor? gen) -> Tensor[]"
)
VLLM_FA3 = (
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, Tensor? cu_seqlens_q,"
    " Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q,"
    " int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos,"
    " Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale,"
    " float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap,"
    " bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin,"
    " Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"
)
VLLM_FA3_SCHEDULE = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k,"
    " int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k,"
    " Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? leftpad_k, int? page_size, int max_seqlen_k_new,"
    " bool is_causal, int window_size_left, int window_size_right, bool has_softcap, int num_splits, bool? pack_gqa,"
    " int sm_margin) -> Tensor"
)
FA3_FWD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None,"
    " Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None,"
    " Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None,"
    " Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None,"
    " Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None,"
    " Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1,"
    " int window_size_right=-1, int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False,"
    " Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0)"
    " -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
FLASHMLA_DENSE = (
    "dense_decode_fwd(Tensor q, Tensor kcache, int head_size_v, Tensor seqlens_k, Tensor block_table,"
    " float softmax_scale, bool is_causal, Tensor(a)? tile_scheduler_metadata, Tensor(b)? num_splits, Tensor(c!)? out_)"
    " -> (Tensor(c!), Tensor, Tensor(a)?, Tensor(b)?)"
)
FLASHMLA_E4M3 = (
    "fwd_kvcache_mla_fp8(Tensor q, Tensor kcache, int head_size_v, Tensor seqlens_k, Tensor block_table,"
    " float softmax_scale, bool is_causal, Tensor tile_scheduler_metadata, Tensor num_splits, Tensor? descale_q,"
    " Tensor? descale_k) -> Tensor[]"
)
FLASHMLA_E4M3_SCHEDULE = (
    "get_mla_decoding_metadata_dense_fp8(Tensor seqlens_k, int num_heads_per_head_k, int num_heads_k) -> Tensor[]"
)


class Recorder:
    """A function that keeps the arguments of each call by name and returns the result of `compute`.

    Args:
        names: names of the arguments, in their order.
        compute: gets the arguments as a dictionary.
        defaults: values of arguments that a call may leave out.
    """

    def __init__(self, names: list[str], compute: Callable[[dict], object], defaults: dict | None = None):
        self.names, self.compute, self.defaults = names, compute, defaults or {}
        self.calls: list[dict] = []

    def __call__(self, *arguments, **options):
        self.calls.append(self.defaults | dict(zip(self.names, arguments, strict=False)) | options)
        return self.compute(self.calls[-1])


@contextlib.contextmanager
def recorded_operators(namespace: str, functions: dict[str, Callable[[dict], object]]) -> Iterator[dict[str, Recorder]]:
    """Define operators with the schemas of a compiled part; return their recorders by name.

    Args:
        namespace: namespace of the operators in `torch.ops`.
        functions: for each schema, the function that computes the result.
    """
    library = torch.library.Library(namespace, "FRAGMENT")
    recorders = {}
    try:
        for schema, compute in functions.items():
            name = schema.partition("(")[0]
            arguments = torch._C.parse_schema(schema).arguments
            defaults = {each.name: each.default_value for each in arguments if each.has_default_value()}
            recorders[name] = Recorder([each.name for each in arguments], compute, defaults)
            library.define(schema)
            library.impl(name, recorders[name], "CPU")
        yield recorders
    finally:
        library._destroy()


@contextlib.contextmanager
def imported_python(module: str, *compiled: str, bare: str | None = None, **attributes) -> Iterator[types.ModuleType]:
    """Import the unmodified Python of a library, with empty modules in the place of its compiled modules.

    Afterwards, `sys.modules` is as before.

    Args:
        module: import name of the module to import.
        compiled: import names of the compiled modules.
        bare: a package whose own `__init__` is not run, because it needs the rest of a large library.
        attributes: attributes of the compiled modules, such as recorders.
    """
    before = dict(sys.modules)
    sources._first_that_loads.cache_clear()
    try:
        if bare is not None:
            package = types.ModuleType(bare)
            spec = importlib.util.find_spec(bare)
            package.__path__, package.__spec__ = list(spec.submodule_search_locations), spec
            sys.modules[bare] = package
        for name in compiled:
            sys.modules[name] = types.ModuleType(name)
            for attribute, value in attributes.items():
                setattr(sys.modules[name], attribute, value)
        yield importlib.import_module(module)
    finally:
        for name in set(sys.modules) - set(before):
            if name.partition(".")[0] in {each.partition(".")[0] for each in (module, *compiled)}:
                del sys.modules[name]
        sources._first_that_loads.cache_clear()


def paged_attention(q, entries_of, seq_lens, query_lens, scale, latent, causal=True, ranks=None):
    """Compute absorbed attention, one request and one row after the other, in float64.

    Args:
        q: [T, N, Lkv + R], latent part first.
        entries_of: function that returns the entries [S, Lkv + R] of a request.
        seq_lens: keys of each request.
        query_lens: query tokens of each request.
        scale: factor of the scores.
        latent: number of latent columns, Lkv.
        causal: whether earlier query tokens see fewer keys.
        ranks: (D, rank, lengths of the whole sequences) if the keys are every D-th token of sequences; otherwise None.

    Returns:
        out [T, N, Lkv] and lse [N, T], both in float64; rows without keys have output 0 and LSE -inf.
    """
    tokens, heads, _ = q.shape
    out = torch.zeros(tokens, heads, latent, dtype=torch.float64)
    lse = torch.full((heads, tokens), -torch.inf, dtype=torch.float64)
    token = 0
    for request, (length, queries) in enumerate(zip(seq_lens, query_lens, strict=True)):
        keys = entries_of(request, length).double()
        for i in range(queries):
            seen = length - queries + i + 1 if causal else length
            if ranks is not None and causal:  # key j is token j * D + rank, and the last query sees all tokens
                size, rank, totals = ranks
                seen = sum(key * size + rank <= totals[request] - queries + i for key in range(length))
            if seen > 0:
                scores = q[token].double() @ keys[:seen].T * scale
                lse[:, token] = scores.logsumexp(-1)
                out[token] = scores.softmax(-1) @ keys[:seen, :latent]
            token += 1
    return out, lse


def entries_in_pages(pages, table):
    """Return a function that gathers the entries of a request from pages [num_pages, page_size, columns]."""

    def entries(request, length):
        page = pages.shape[1]
        used = table[request, : -(-length // page)].long()
        return pages[used].flatten(0, 1)[:length]

    return entries
