"""Zeros for the padding tokens of a captured decode.

A padding token is a query token behind the last request. A CUDA graph has a fixed number of tokens, so a replay with
fewer query tokens has padding tokens.
"""

from __future__ import annotations

import torch
from jaxtyping import Int32, Shaped
from torch import Tensor

from reference.interfaces import E4M3, FLOAT_DTYPES, GraphSupport, check_tensor

from .. import backends
from ..backends import BackendChoice


def zero_padding_tokens(
    output: Shaped[Tensor, "T N V"],
    query_start_loc: Int32[Tensor, " offsets"],
    *,
    graph: GraphSupport = GraphSupport.NONE,
    backend: BackendChoice = None,
) -> None:
    """Write zeros to the rows of `output` that belong to padding tokens: the rows from `query_start_loc[-1]` on.

    A decode kernel leaves these rows undefined. The host does not know the value of `query_start_loc[-1]` in a replay,
    so a kernel reads this value on the device. The kernel has one program for each of the T tokens.

    Args:
        output: [T, N, V] (tokens, heads, value dimension), of a float dtype or in e4m3; written in place.
        query_start_loc: [B + 1], first token of each of the B requests; the last element is the number of query tokens,
            at most T.
        graph: kind of the CUDA graph that contains the call; NONE if no graph contains the call.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Raises:
        ValueError: shapes, dtypes or devices do not match.
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    check_tensor("output", output, ("T", "N", "V"), (*FLOAT_DTYPES, E4M3))
    check_tensor("query_start_loc", query_start_loc, ("B + 1",), (torch.int32,), output.device)
    request = backends.state_request("zero_padding_tokens", output, graph)
    _ZEROS(output, query_start_loc, backends.select(request, backend).name)


def _launch_zeros(output, query_start_loc, backend):
    backends.kernel(backend, "zero_padding_tokens")(output, query_start_loc)


_zero_padding_tokens = torch.library.custom_op(
    "mla_twins::zero_padding_tokens",
    _launch_zeros,
    mutates_args=("output",),
    schema="(Tensor(a!) output, Tensor query_start_loc, str backend) -> ()",
)


_ZEROS = backends.DirectCalls(torch.ops.mla_twins.zero_padding_tokens, _launch_zeros, mutates=(0,))


@_zero_padding_tokens.register_fake
def _(output, query_start_loc, backend):
    return None
