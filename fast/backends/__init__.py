"""Which backend serves a call: each declares what it can do; the choice is by capability, then priority.

A backend is a set of kernels behind one name. It declares the ops that it has kernels of its own for, and no others.
Every `backend=` of `fast` is None, a name, or a mapping from op to name (`BackendChoice`):

- None chooses for each op and call: the backend of highest priority that has no reason against the call.
- A name at an op, a function that launches the kernels of one op (`mla_decode`, `merge_attn_states`), is that backend
  or an error: a backend that cannot serve the call raises `UnsupportedConfiguration` with every reason.
- A name at whatever calls several ops binds the ops that the backend declares; the others are chosen as for None.
  These are `MLAAttention`, `MLAMetadataBuilder`, `build_mla_metadata`, `use_mla`, `warmup`, `explain`,
  the main job's `--backend`, and the functions `forward_prefill`, `cascade_attention`, `dcp_gather_context` and
  `dcp_decode`. A bound op that its backend cannot serve raises as above. A backend that declares none of the ops that
  are called is refused at once. So "hopper" binds the decode of `dcp_decode`, whose exchange is chosen, and is refused
  by `forward_prefill`.
- A mapping gives the backend of each op that it names, everywhere; an op that it lacks is chosen as for None. An op or
  a name that nothing has, and an op that its backend does not declare, is refused at once.

The ops of one decode (`DECODES`) belong together, because the number of programs is that of the kernel which decodes.
The ops of one message between ranks (`MESSAGES`) belong together, because the layout of the buffer between them is
private to a backend. A mapping that names a backend for one of them names it
for the others too, as far as that backend declares them; two different names are refused.
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
