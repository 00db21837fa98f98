"""Cut the keys of a decode over programs, so that all take about as long."""

from __future__ import annotations

import torch
from jaxtyping import Int32
from torch import Tensor

from reference.interfaces import (
    DecodeSchedule,
    GraphSupport,
    ScheduleCosts,
    check_flag,
    check_int,
    check_not_negative,
    check_schedule_costs,
    check_tensor,
    check_type,
    invariant_cut,
)

from .. import backends
from ..backends import BackendChoice


def plan_decode(
    seq_lens: Int32[Tensor, " B"],
    num_programs: int,
    costs: ScheduleCosts | None = None,
    batch_invariant: bool = False,
    *,
    graph: GraphSupport = GraphSupport.NONE,
    backend: BackendChoice = None,
) -> DecodeSchedule:
    """Cut the keys of a decode over programs, so that all take about as long.

    Lay the requests end to end, each as long as its tiles and the cost of starting on it (`request_cost`), and cut the
    line into pieces of Q = ceil(length / programs): program p takes the tiles in [p Q, (p + 1) Q). It pays the cost of
    a request that it continues once more, so that none carries more than Q and one such cost. A request without keys
    lies nowhere and has no split; the combine writes its empty row.

    With `batch_invariant` a request is cut every `invariant_split_tiles` tiles, by its own length and the cut of
    `costs` alone, whatever stands beside it. Splits are laid end to end, each with `split_cost` of the costs (at most
    `request_cost`), the first with all of `request_cost`; a program takes those that start in its piece of the line.

    Args:
        seq_lens: [B], keys of each request.
        num_programs: that run at once.
        costs: of the kernel that decodes, beside its tiles; None for the neutral ones. `schedule_costs` gives
            those of a device, which builders pass.
        batch_invariant: see above.
        graph: graphs in which the call is replayed.
        backend: a name, a mapping from op to name, or None for the choice by capability (`fast.backends`).

    Returns:
        The schedule, on the device of `seq_lens`.

    Raises:
        TypeError: costs of another type.
        ValueError: a number below its least value; on a CPU a negative length (a GPU takes it for 0).
        UnsupportedConfiguration: no backend, or not the named one, can serve.
    """
    check_tensor("seq_lens", seq_lens, ("B",), (torch.int32,))
    check_int("num_programs", num_programs, 1, "at least 1")
    check_flag("batch_invariant", batch_invariant)
    costs = check_schedule_costs(costs)
    check_type("graph", graph, GraphSupport)
    request = backends.KernelRequest("plan_decode", seq_lens.device, batch_invariant=batch_invariant, graph=graph)
    chosen = backends.select(request, backend)
    tile_ranges, split_offsets = torch.ops.mla_twins.plan_decode(
        seq_lens,
        num_programs,
        costs.request_cost,
        costs.split_cost,
        list(costs.cut.numbers),
        batch_invariant,
        chosen.name,
    )
    return DecodeSchedule(tile_ranges, split_offsets, batch_invariant, costs.cut)


@torch.library.custom_op(
    "mla_twins::plan_decode",
    mutates_args=(),
    schema="(Tensor seq_lens, SymInt num_programs, SymInt request_cost, SymInt split_cost, SymInt[] cut,"
    " bool batch_invariant, str backend) -> (Tensor, Tensor)",
)
def _plan_decode(seq_lens, num_programs, request_cost, split_cost, cut, batch_invariant, backend):
    if seq_lens.device.type == "cpu":
        check_not_negative("seq_lens", seq_lens)
    launch = backends.kernel(backend, "plan_decode")
    return launch(seq_lens, num_programs, request_cost, split_cost, invariant_cut(*cut), batch_invariant)


@_plan_decode.register_fake
def _(seq_lens, num_programs, request_cost, split_cost, cut, batch_invariant, backend):
    return seq_lens.new_empty(num_programs, 5), seq_lens.new_empty(seq_lens.shape[0] + 1)
