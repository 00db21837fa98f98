"""Compute the schedule of a decode: assign tiles of 64 keys to the programs of the decode kernel.

`reference.planning.decode_schedule` explains tiles, splits and the combine kernel.
"""

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
    invariant_split_rule,
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
    """Compute the schedule of a decode: assign tiles to programs, so that all programs take about the same time.

    See `reference.planning.decode_schedule.plan_decode` for the rule. If `seq_lens` is on a GPU, the schedule is
    computed on the GPU and the host does not wait.

    Args:
        seq_lens: [B], keys of each request.
        num_programs: number of programs of the decode kernel; all programs run at the same time.
        costs: costs of the decode kernel, in units of the time of one tile; None means the defaults of `ScheduleCosts`.
            `schedule_costs` returns measured costs.
        batch_invariant: if True, the splits of a request depend on the length of this request alone.
        graph: kind of the CUDA graph that captures this call; NONE without a graph.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Returns:
        The schedule, on the device of `seq_lens`.

    Raises:
        TypeError: `costs` is neither a `ScheduleCosts` nor None.
        ValueError: `num_programs` is below 1, or a length in a CPU tensor is negative. (On a GPU, a negative length
            counts as 0.)
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    costs = check_schedule_costs(costs)
    signature = _PLANS.signature(seq_lens, num_programs, costs, batch_invariant, graph, backend)
    chosen = _PLANS.backend_of(signature)
    if chosen is None:
        check_tensor("seq_lens", seq_lens, ("B",), (torch.int32,))
        check_int("num_programs", num_programs, 1, "at least 1")
        check_flag("batch_invariant", batch_invariant)
        check_type("graph", graph, GraphSupport)
        request = backends.KernelRequest("plan_decode", seq_lens.device, batch_invariant=batch_invariant, graph=graph)
        chosen = backends.select(request, backend).name
    tile_ranges, split_offsets = _PLANS.run(
        signature, chosen, seq_lens, num_programs, costs.request_cost, costs.split_cost,
        costs.splits_per_tile, list(costs.split_rule.numbers), batch_invariant,
    )  # fmt: skip
    return DecodeSchedule(tile_ranges, split_offsets, batch_invariant, costs.split_rule)


def _launch_plan(
    seq_lens, num_programs, request_cost, split_cost, splits_per_tile, split_rule, batch_invariant, backend
):
    if seq_lens.device.type == "cpu":
        check_not_negative("seq_lens", seq_lens)
    launch = backends.kernel(backend, "plan_decode")
    return launch(
        seq_lens, num_programs, request_cost, split_cost, splits_per_tile, invariant_split_rule(*split_rule),
        batch_invariant,
    )  # fmt: skip


_plan_decode = torch.library.custom_op(
    "mla_twins::plan_decode",
    _launch_plan,
    mutates_args=(),
    schema="(Tensor seq_lens, SymInt num_programs, SymInt request_cost, SymInt split_cost, SymInt splits_per_tile,"
    " SymInt[] split_rule, bool batch_invariant, str backend) -> (Tensor, Tensor)",
)
_PLANS = backends.CheckedCalls(torch.ops.mla_twins.plan_decode, _launch_plan)


@_plan_decode.register_fake
def _(seq_lens, num_programs, request_cost, split_cost, splits_per_tile, split_rule, batch_invariant, backend):
    return seq_lens.new_empty(num_programs, 5), seq_lens.new_empty(seq_lens.shape[0] + 1)
