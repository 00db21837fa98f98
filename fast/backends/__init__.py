"""Choose the backend that serves a call: the backend with the highest priority of all that can serve the call.

An op is a function of `fast` that kernels implement, such as `mla_decode`. A backend is a set of kernels behind one
name, such as "triton". A backend declares its ops, and the calls of each op that its kernels can serve. Every parameter
`backend=` of `fast` is None, a name, or a mapping from op to name (`BackendChoice`):

- None: each call of each op goes to the backend with the highest priority that can serve the call.
- A name, passed to a function with one op (such as `mla_decode` or `merge_attn_states`): the named backend serves the
  call. If the named backend cannot serve the call, the function raises `UnsupportedConfiguration` with every reason.
- A name, passed to a class or function that calls several ops, such as `MLAAttention`, `warmup`, `forward_prefill` or
  `dcp_decode`: every op that the named backend declares is *bound* to this backend. The backends of the other ops are
  chosen as with None. A bound op raises `UnsupportedConfiguration` if its backend cannot serve the call. If the backend
  declares none of the called ops, the class or function raises `UnsupportedConfiguration` at once. For example,
  `dcp_decode(.., backend="hopper")` decodes with "hopper" and merges the states of the ranks with another backend.
  `GQAAttention(.., backend="hopper")` raises, because "hopper" has no op of grouped-query attention.
- A mapping: each op in the mapping is bound to the given backend. The backends of the other ops are chosen as with
  None. An unknown op, an unknown name, or an op that the given backend does not declare raises an error at once. The
  keys "gqa_decode" and "gqa_prefill" bind `gqa_paged_attention` for one part of a layer's step alone.

In each of these two groups, all ops must be served by the same backend:

- The ops of one decode (`DECODES`): a schedule is made for the number of programs and the costs of one kernel. The
  schedule fits no other kernel.
- The ops that write and read a message between ranks (`MESSAGES`): each backend has its own layout of the message.

If a mapping binds one op of a group to a backend, the mapping also binds every other op of the group that this backend
declares. A mapping with two different names in one group raises ValueError.
"""

from .adapters import register_adapters
from .checked_calls import (
    CallsInside,
    CheckedCalls,
    CheckedOnce,
    NoSignature,
    check_every_call,
    confirm,
    must_be_checked,
    repeats,
    signature_of,
    with_wanted_checks,
    without_gradients,
)
from .direct_calls import DirectCalls
from .environment import VARIABLES, bind_with_environment
from .explanation import explain, layer_requests
from .gqa_requests import (
    check_ignored_scales,
    key_value_write_request,
    paged_attention_request,
    varlen_attention_request,
)
from .kernel_request import GQA_OPS, AttentionSizes, KernelRequest
from .nested_calls import CallsOfOthers, Entry
from .one_set import check_one_set_of_parameters
from .own import DECODES, MESSAGES, OWN_BACKENDS, register_own
from .registry import (
    Backend,
    OpSupport,
    imported,
    on_change,
    register,
    registered,
    support_of,
    unregister,
)
from .repeated_launches import launch
from .results import check_state, kernel
from .selection import (
    BackendChoice,
    BoundOps,
    bind,
    cache_in_words,
    cache_request,
    copy_request,
    decode_request,
    query_lens_of,
    select,
    select_for_all,
    state_request,
)

__all__ = [
    "DECODES",
    "GQA_OPS",
    "MESSAGES",
    "OWN_BACKENDS",
    "VARIABLES",
    "AttentionSizes",
    "Backend",
    "BackendChoice",
    "BoundOps",
    "CallsInside",
    "CallsOfOthers",
    "CheckedCalls",
    "CheckedOnce",
    "DirectCalls",
    "Entry",
    "KernelRequest",
    "NoSignature",
    "OpSupport",
    "bind",
    "bind_with_environment",
    "cache_in_words",
    "cache_request",
    "check_every_call",
    "check_ignored_scales",
    "check_one_set_of_parameters",
    "check_state",
    "confirm",
    "copy_request",
    "decode_request",
    "explain",
    "imported",
    "kernel",
    "key_value_write_request",
    "launch",
    "layer_requests",
    "must_be_checked",
    "on_change",
    "paged_attention_request",
    "query_lens_of",
    "register",
    "registered",
    "repeats",
    "select",
    "select_for_all",
    "signature_of",
    "state_request",
    "support_of",
    "unregister",
    "varlen_attention_request",
    "with_wanted_checks",
    "without_gradients",
]

register_own()
register_adapters()
