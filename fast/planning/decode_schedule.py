"""Cut the keys of a decode over programs, so that all take about as long."""

from __future__ import annotations

import torch
from jaxtyping import Int32
from torch import Tensor

from reference.interfaces import (
    DecodeSchedule,
    check_flag,
    check_int,
    check_not_negative,
    check_tensor,
    piece_overhead,
)

from .. import backends
from ..backends import BackendChoice


def plan_decode(
    seq_lens: Int32[Tensor, " B"],
    num_programs: int,
    num_heads: int,
    fixed_overhead: int | None = None,
    batch_invariant: bool = False,
    *,
    backend: BackendChoice = None,
) -> DecodeSchedule:
    """Cut the keys of a decode over programs, so that all take about as long.

    Lay the requests end to end, each as long as its tiles and the overhead of starting on it, and cut the line into
    pieces of Q = ceil(length / programs): program p takes the tiles in [p Q, (p + 1) Q). It pays the overhead of a
    request that it continues once more, so that none carries more than Q and one overhead. A request without keys lies
    nowhere and has no split; the combine writes its empty row.

    With `batch_invariant` a request is cut every `invariant_split_tiles` tiles, by its own length and N alone, whatever
    stands beside it. Splits are laid end to end, each with `fold_overhead` of the overhead (at most all), the first
    with all of it; a program takes those that start in its piece of the line.

    Args:
        seq_lens: [B], keys of each request.
        num_programs: that run at once.
        num_heads: N.
        fixed_overhead: what starting on a request costs, in tiles, or None for `piece_overhead`.
        batch_invariant: see above.
        backend: a name, a mapping from op to name, or None for the choice by capability (`fast.backends`).

    Returns:
        The schedule, on the device of `seq_lens`.

    Raises:
        ValueError: a number below its least value; on a CPU a negative length (a GPU takes it for 0).
        UnsupportedConfiguration: no backend, or not the named one, can serve.
    """
    check_tensor("seq_lens", seq_lens, ("B",), (torch.int32,))
    check_int("num_programs", num_programs, 1, "at least 1")
    check_int("num_heads", num_heads, 1, "at least 1")
    check_flag("batch_invariant", batch_invariant)
    if fixed_overhead is None:
        fixed_overhead = piece_overhead(num_heads)
    check_int("fixed_overhead", fixed_overhead, 0, "an int >= 0 or None")
    request = backends.KernelRequest("plan_decode", seq_lens.device, batch_invariant=batch_invariant)
    chosen = backends.select(request, backend)
    tile_ranges, split_offsets = torch.ops.mla_twins.plan_decode(
        seq_lens, num_programs, num_heads, fixed_overhead, batch_invariant, chosen.name
    )
    return DecodeSchedule(tile_ranges, split_offsets, batch_invariant)


@torch.library.custom_op(
    "mla_twins::plan_decode",
    mutates_args=(),
    schema="(Tensor seq_lens, SymInt num_programs, SymInt num_heads, SymInt fixed_overhead, bool batch_invariant,"
    " str backend) -> (Tensor, Tensor)",
)
def _plan_decode(seq_lens, num_programs, num_heads, fixed_overhead, batch_invariant, backend):
    if seq_lens.device.type == "cpu":
        check_not_negative("seq_lens", seq_lens)
    launch = backends.kernel(backend, "plan_decode")
    return launch(seq_lens, num_programs, num_heads, fixed_overhead, batch_invariant)


@_plan_decode.register_fake
def _(seq_lens, num_programs, num_heads, fixed_overhead, batch_invariant, backend):
    return seq_lens.new_empty(num_programs, 5), seq_lens.new_empty(seq_lens.shape[0] + 1)
