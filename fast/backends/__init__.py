"""Choice of the backend that serves a call: the backend with the highest priority that can serve this call.

A backend is a set of kernels behind one name. A backend declares its ops, and what the kernels of each op can do. Every
parameter `backend=` of `fast` is None, a name, or a mapping from op to name (`BackendChoice`):

- None: each call of each op goes to the backend with the highest priority that can serve the call.
- A name, passed to a function that launches one op (such as `mla_decode` or `merge_attn_states`): the named backend
  serves the call. If the named backend cannot serve the call, the function raises `UnsupportedConfiguration` with every
  reason.
- A name, passed to a class or function that calls several ops: the name binds the ops that this backend declares. Every
  other op chooses its backend as with None. This applies to `MLAAttention`, `MLAMetadataBuilder`, `build_mla_metadata`,
  `use_mla`, `warmup`, `explain`, `forward_prefill`, `cascade_attention`, `dcp_gather_context`, `dcp_decode` and the
  option `--backend` of the main job. A bound op raises `UnsupportedConfiguration` if its backend cannot serve the call.
  The name of a backend that declares none of the called ops raises `UnsupportedConfiguration` at once. For example,
  `dcp_decode(.., backend="hopper")` decodes with "hopper" and exchanges states with another backend, and
  `forward_prefill(.., backend="hopper")` raises.
- A mapping: each op in the mapping is bound to the given backend. Every other op chooses its backend as with None. An
  unknown op, an unknown name, or an op that the given backend does not declare is an error at once.

Some ops must be served by the same backend:

- The ops of one decode (`DECODES`), because the number of programs and the costs belong to one decode kernel.
- The ops of one message between ranks (`MESSAGES`), because each backend has its own layout of the message.

A mapping that binds one op of such a group also binds the other ops of the group that the backend declares. A mapping
with two different names in one group raises ValueError.
"""

from .checked_calls import (
    CallsInside,
    CheckedCalls,
    CheckedOnce,
    NoSignature,
    check_every_call,
    confirm,
    must_be_dispatched,
    signature_of,
    with_wanted_checks,
    without_gradients,
)
from .explanation import explain, layer_requests
from .nested_calls import CallsOfOthers
from .own import DECODES, MESSAGES, register_own
from .registry import Backend, KernelRequest, OpSupport, kernel, on_change, register, registered, unregister
from .repeated_launches import launch
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
    state_request,
)

__all__ = [
    "DECODES",
    "MESSAGES",
    "Backend",
    "BackendChoice",
    "BoundOps",
    "CallsInside",
    "CallsOfOthers",
    "CheckedCalls",
    "CheckedOnce",
    "KernelRequest",
    "NoSignature",
    "OpSupport",
    "bind",
    "cache_in_words",
    "cache_request",
    "check_every_call",
    "confirm",
    "copy_request",
    "decode_request",
    "explain",
    "kernel",
    "launch",
    "layer_requests",
    "must_be_dispatched",
    "on_change",
    "query_lens_of",
    "register",
    "registered",
    "select",
    "signature_of",
    "state_request",
    "unregister",
    "with_wanted_checks",
    "without_gradients",
]

register_own()
