"""Record the ops of a step with their arguments, so that each op can be timed alone.

An op here is any op that PyTorch dispatches: an op of `fast`, a matrix product, a copy. Views and allocations launch no
kernel and are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .timing import Call, Clock, Spread, in_turn

CALLS_IN_A_GRAPH = 64
ALLOCATIONS = ("empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like")


@dataclass(frozen=True)
class RecordedOp:
    """One call of an op, ready to be repeated."""

    name: str
    call: Call


class _Recorder(TorchDispatchMode):
    """Dispatch mode of PyTorch that runs every op, and records an op if it launches a kernel on the given device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.ops = device, list[RecordedOp]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        namespace, name = func._schema.name.split("::")
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        result = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        computes = not results or any(tensor.numel() for tensor in results)
        if (
            any(tensor.device.type == self.device for tensor in tensors)
            and computes
            and not view
            and not (namespace == "aten" and name in ALLOCATIONS)
        ):
            self.ops.append(RecordedOp(f"{namespace}::{name}", partial(func, *args, **kwargs)))
        return result


def record(run: Callable[[], object], device: str) -> list[RecordedOp]:
    """Run a function and return the ops that launch a kernel on the given device.

    Views, allocations and ops with empty results launch no kernel. The returned ops keep their tensors in memory.
    """
    with _Recorder(device) as recorder:
        run()
    return recorder.ops


def time_ops(clock: Clock | None, plan: Sequence[RecordedOp], layers: Sequence[Sequence[RecordedOp]], num_layers: int):
    """Time each op of a step alone, and return the sum over all ops of the step.

    An op is replayed from a CUDA graph that calls the op with the arguments of each recorded layer in turn.

    Args:
        clock: clock of the GPU, or None on a CPU. On a CPU each op is called once, and its time is the wall time.
        plan: ops of the plan, which run once in a step.
        layers: recorded ops of some layers; each layer has the same ops.
        num_layers: number of layers in the step.

    Returns:
        The sum in microseconds, and a dictionary for every op of the plan and of one layer: its name, the number of
        its calls in a step (`times`), and the spread of its time.

    Raises:
        AssertionError: the layers differ in their ops, or no op of a layer is an attention op.
    """
    names = [[op.name for op in layer] for layer in layers]
    if any(other != names[0] for other in names):
        raise AssertionError(f"expected equal ops in all layers, got {names[0]} and others")
    if not any(op in name for name in names[0] for op in ("mla_twins::mla_decode", "mla_twins::flash_attn_varlen")):
        raise AssertionError(f"expected mla_decode or flash_attn_varlen in a layer, got {', '.join(names[0])}")
    bodies = [(op.name, [op.call]) for op in plan]
    bodies += [(name, [layer[place].call for layer in layers]) for place, name in enumerate(names[0])]
    found: list[dict[str, Any]] = []
    for number, (name, calls) in enumerate(bodies):
        times = 1 if number < len(plan) else num_layers
        found.append({"op": name, "times": times, **_spread_of(clock, calls)})
    return sum(op["times"] * op["median_us"] for op in found), found


def _spread_of(clock: Clock | None, calls: Sequence[Call]) -> dict[str, Any]:
    if clock is None:
        start = time.perf_counter()
        calls[0]()
        return asdict(Spread.of([1e6 * (time.perf_counter() - start)]))
    spread = clock.captured({"op": in_turn(calls, CALLS_IN_A_GRAPH)}, {"op": CALLS_IN_A_GRAPH})
    if "op" not in spread:
        raise RuntimeError(f"an op could not be captured: {clock.not_captured['op']}")
    return asdict(spread["op"])
