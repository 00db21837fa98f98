"""Choose which backend serves a call: among those that can serve it, the one with the highest priority.

A backend is a set of kernels behind one name. It declares the ops for which it has its own kernels, and what these
kernels can do. Every parameter `backend=` of `fast` is None, a name, or a mapping from op to name (`BackendChoice`):

- None: each call of each op goes to the backend with the highest priority that has no reason against the call.
- A name, passed to a function that launches one op (such as `mla_decode` or `merge_attn_states`): that backend serves
  the call. If it cannot, the function raises `UnsupportedConfiguration` with every reason.
- A name, passed to a class or function that calls several ops: the name binds the ops that this backend declares, and
  each other op is chosen as for None. This applies to `MLAAttention`, `MLAMetadataBuilder`, `build_mla_metadata`,
  `use_mla`, `warmup`, `explain`, `forward_prefill`, `cascade_attention`, `dcp_gather_context`, `dcp_decode` and the
  option `--backend` of the main job. A bound op that its backend cannot serve raises as above. A backend that declares
  none of the called ops is refused at once. For example, "hopper" binds the decode of `dcp_decode` but not its exchange
  between ranks, and `forward_prefill` refuses it.
- A mapping: each op that it contains is bound to the given backend; each other op is chosen as for None. An unknown op,
  an unknown name, and an op that its backend does not declare are refused at once.

Some ops must be served by the same backend:

- The ops of one decode (`DECODES`), because the number of programs and the costs are those of the decode kernel.
- The ops of one message between ranks (`MESSAGES`), because the layout of the message is private to a backend.

A mapping that binds one op of such a group binds the others too, if the backend declares them. Two different names in
one group are refused.
"""

from .explanation import explain, layer_requests
from .own import DECODES, MESSAGES, register_own
from .registry import Backend, KernelRequest, OpSupport, kernel, on_change, register, registered, unregister
from .selection import (
    BackendChoice,
    BoundOps,
    bind,
    cache_in_words,
    cache_request,
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
    "KernelRequest",
    "OpSupport",
    "bind",
    "cache_in_words",
    "cache_request",
    "decode_request",
    "explain",
    "kernel",
    "layer_requests",
    "on_change",
    "query_lens_of",
    "register",
    "registered",
    "select",
    "state_request",
    "unregister",
]

register_own()
