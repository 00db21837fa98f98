"""Groups of ranks that exchange tensors, with `torch.distributed` or within one process (module `simulation`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..interfaces import (
    MERGES,
    GroupError,
    MLAConfig,
    TokenOwnership,
    UnsupportedConfiguration,
    check,
    check_tensor,
    check_type,
    is_positive_int,
)
from ..interfaces.gqa import GQAConfig, kv_heads_of_ranks, rank_config


class Pending:
    """The result of an exchange that may still be running.

    Args:
        result: tensor that `wait` returns.
        finish: function that waits for the exchange; the first call of `wait` calls it. None if the exchange is
            complete.
    """

    def __init__(self, result: Tensor, finish: Callable[[], object] | None = None):
        self._result, self._finish = result, finish

    def wait(self) -> Tensor:
        """Return the result after the exchange is complete.

        With NCCL the current CUDA stream waits for the exchange; with gloo the host waits.
        """
        if self._finish is not None:
            self._finish()
            self._finish = None
        return self._result


class Group(ABC):
    """Ranks that exchange tensors. All ranks must call the same operations in the same order, with equal shapes.

    Attributes:
        name: name of the group in error messages.
        size: D, number of ranks.
        rank: this rank, in [0, D).
        members: global ranks of the members, in order.
        received: {operation: bytes that this rank received so far}. The bytes are not measured but computed: the
            smallest number of bytes with which the operation is possible. For an argument of n bytes, an all-gather
            counts (D - 1) n bytes. A reduce-scatter or an all-to-all counts (D - 1) n / D bytes, and an all-reduce
            counts 2 (D - 1) n / D bytes. An exchange in a CUDA graph is counted at the capture, and not at the replays.
        last_operation: name of the operation that was started last.
    """

    def __init__(self, name: str, size: int, rank: int, members: Sequence[int]):
        self.name, self.size, self.rank, self.members = name, size, rank, tuple(members)
        self.received: Counter[str] = Counter()
        self.last_operation = "none"

    @property
    def timeout_s(self) -> float | None:
        """Return the seconds after which an exchange fails; None if exchanges have no timeout."""
        return None

    @property
    def fails_on_its_own(self) -> bool:
        """Return whether an exchange raises an exception by itself if another rank is dead."""
        return True

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the tensors `x` of all ranks as one tensor [D, *x.shape].

        Args:
            x: tensor of this rank.
            out: contiguous tensor [D, *x.shape] for the result; None means that a new tensor is allocated.
        """
        return self.all_gather_async(x, out).wait()

    def all_gather_async(self, x: Tensor, out: Tensor | None = None) -> Pending:
        """Start an `all_gather` and return without waiting for its end; `Pending.wait` returns the result."""
        self._begin("all_gather", (self.size - 1) * _bytes(x))
        if out is None:
            out = x.new_empty(self.size, *x.shape)
        check_tensor("out", out, (self.size, *x.shape), (x.dtype,), x.device)
        check(out.is_contiguous(), "out", "a contiguous tensor", f"strides {out.stride()}")
        if self.size == 1 or x.numel() == 0:
            return Pending(out.copy_(x))
        return self._all_gather(x.contiguous(), out)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return the sum of x[r] over the tensors `x` of all ranks, where r is this rank: [D, ...] -> [...]."""
        self._check_parts("reduce_scatter", x)
        self._begin("reduce_scatter", (self.size - 1) * _bytes(x) // self.size)
        return x[0].clone() if self.size == 1 or x.numel() == 0 else self._reduce_scatter(x.contiguous())

    def all_to_all(self, x: Tensor) -> Tensor:
        """Return x[r] from the tensor `x` of every rank, where r is this rank: [D, ...] -> [D, ...]."""
        self._check_parts("all_to_all", x)
        self._begin("all_to_all", (self.size - 1) * _bytes(x) // self.size)
        return x.clone() if self.size == 1 or x.numel() == 0 else self._all_to_all(x.contiguous())

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over all ranks, with the same bits on every rank.

        `x` may be overwritten, and the result may be `x` itself.
        """
        self._begin("all_reduce", 2 * (self.size - 1) * _bytes(x) // self.size)
        return x if self.size == 1 or x.numel() == 0 else self._all_reduce(x.contiguous())

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the Python objects `value` of all ranks. The exchange is slow, so do not call it in every step."""
        self._begin("all_gather_object", 0)
        return [value] if self.size == 1 else self._all_gather_object(value)

    def _check_parts(self, operation: str, x: Tensor) -> None:
        """Check that the first dimension of a tensor has size D."""
        check(x.dim() > 0 and x.shape[0] == self.size, operation,
              f"a first dimension of {self.size}, one element for each rank", f"shape {list(x.shape)}")  # fmt: skip

    def _begin(self, operation: str, num_bytes: int) -> None:
        """Record the start of an operation and the bytes that this rank receives."""
        self.last_operation = operation
        self.received[operation] += num_bytes

    @abstractmethod
    def _all_gather(self, x: Tensor, out: Tensor) -> Pending: ...

    @abstractmethod
    def _reduce_scatter(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _all_to_all(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _all_reduce(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _all_gather_object(self, value: Any) -> list[Any]: ...


def _bytes(x: Tensor) -> int:
    """Return the bytes of a tensor."""
    return x.numel() * x.element_size()


def _either(new: str, old: str) -> Callable[..., Any]:
    """Return the function `new` of `torch.distributed`; if this PyTorch lacks it, return the older function `old`."""
    return getattr(dist, new, None) or getattr(dist, old)


class ProcessRanks(Group):
    """The ranks of a process group of `torch.distributed` that the caller made.

    With gloo, a failed exchange (a dead rank, a timeout) raises `GroupError`. With NCCL the call returns before the
    exchange is complete, so the call cannot raise. The watchdog of PyTorch ends the process instead.

    Args:
        group: process group, or device mesh of one dimension.
        name: name of the group in error messages.

    Raises:
        TypeError: `group` is neither a process group nor a device mesh.
        ValueError: the device mesh has several dimensions, or this process is not a member of the group.
    """

    def __init__(self, group: Any, name: str):
        if hasattr(group, "get_group"):  # a DeviceMesh
            check(group.ndim == 1, name, "a device mesh of one dimension", f"{group.ndim} dimensions")
            group = group.get_group()
        outside = isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER
        check(not outside, name, "a group that this process is a member of", "a group without this process")
        if group is None or not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"{name}: expected a process group or a device mesh, got {type(group).__name__}")
        rank = dist.get_rank(group)
        check(rank >= 0, name, "a group that this process is a member of", "a group without this process")
        super().__init__(name, dist.get_world_size(group), rank, dist.get_process_group_ranks(group))
        self.group = group
        # the configuration of the group is a string such as "cpu:gloo,cuda:nccl"
        engines = dict(pair.rsplit(":", 1) for pair in dist.get_backend_config(group).split(","))
        self._is_nccl = engines.get("cuda") == "nccl"

    @property
    def timeout_s(self) -> float | None:
        """Return the seconds after which an exchange fails: the timeout with which the caller made the group."""
        device = torch.device("cuda" if self._is_nccl else "cpu")
        return self.group._get_backend(device).options._timeout.total_seconds()

    @property
    def fails_on_its_own(self) -> bool:
        """Return False for NCCL, whose calls return before the exchange is complete; True for other backends."""
        return not self._is_nccl

    def _call(self, operation: str, collective: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return collective(*args, group=self.group, **options)
        except RuntimeError as error:
            raise self._failed(operation, error) from error

    def _failed(self, operation: str, error: RuntimeError) -> GroupError:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return GroupError(
            f"{self.name}: {operation} of rank {self.rank} among ranks {list(self.members)} failed: {reason}"
        )

    def _all_gather(self, x: Tensor, out: Tensor) -> Pending:
        collective = _either("all_gather_single", "all_gather_into_tensor")
        work = self._call("all_gather", collective, out.view(-1), x.view(-1), async_op=True)

        def finish() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._failed("all_gather", error) from error

        return Pending(out, finish)

    def _reduce_scatter(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[1:])
        collective = _either("reduce_scatter_single", "reduce_scatter_tensor")
        self._call("reduce_scatter", collective, out.view(-1), x.view(-1))
        return out

    def _all_to_all(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self._call("all_to_all", dist.all_to_all_single, out, x)
        return out

    def _all_reduce(self, x: Tensor) -> Tensor:
        self._call("all_reduce", dist.all_reduce, x)
        return x

    def _all_gather_object(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        self._call("all_gather_object", dist.all_gather_object, values, value)
        return values


@dataclass(frozen=True, eq=False)
class ContextParallel:
    """The groups of decode context parallelism.

    Let D be the number of ranks of `cp_group` and TP the number of ranks of `tp_group`. The ranks of `cp_group` divide
    the tokens of every sequence among themselves, and the ranks of `tp_group` divide the N heads. Each rank has the
    weights of N / TP heads. Its cache has the tokens that the rank owns (its rank-local tokens). A decode has these
    steps:

    1. The ranks of `cp_group` gather their queries, so each rank has the queries of N D / TP heads.
    2. Each rank attends its rank-local keys with these queries.
    3. The ranks merge the D attention states of each head. The merged state is on the owner rank of the head, which is
       the rank that has the weights of the head.
    4. The outputs of `o_proj` are summed over `tp_group`.

    Attributes:
        cp_group: a process group, a device mesh of one dimension, or a group from `simulate`.
        tp_group: an object of one of these types. The group contains all ranks of `cp_group`.
        interleave: I. Each rank in turn owns I consecutive tokens of a sequence.
        merge: name of the merge in step 3: "a2a" (`cp_lse_a2a`) or "ag_rs" (`cp_lse_ag_out_rs`).
        ownership: the tokens that this rank owns; computed from `cp_group` and `interleave`.

    Raises:
        TypeError: `cp_group` or `tp_group` has another type.
        ValueError: `cp_group` is not a subgroup of `tp_group`, or TP is not a multiple of D; `merge` is neither
            "a2a" nor "ag_rs".
    """

    cp_group: Any
    tp_group: Any
    interleave: int = 1
    merge: str = "a2a"
    ownership: TokenOwnership = field(init=False)

    def __post_init__(self):
        for name in ("cp_group", "tp_group"):
            group = getattr(self, name)
            object.__setattr__(self, name, group if isinstance(group, Group) else ProcessRanks(group, name))
        cp, tp = self.cp_group, self.tp_group
        object.__setattr__(self, "ownership", TokenOwnership(cp.size, cp.rank, self.interleave))
        check(self.merge in MERGES, "merge", f"one of {', '.join(MERGES)}", repr(self.merge))
        check(set(cp.members) <= set(tp.members), "cp_group", f"a subgroup of tp_group, ranks {list(tp.members)}",
              list(cp.members))  # fmt: skip
        check(tp.size % cp.size == 0, "cp_group", f"a size that divides the {tp.size} ranks of tp_group", cp.size)

    @property
    def size(self) -> int:
        """Return D, the number of ranks of `cp_group`."""
        return self.cp_group.size

    @property
    def rank(self) -> int:
        """Return this rank in `cp_group`, in [0, D)."""
        return self.cp_group.rank

    def local_heads(self, num_heads: int) -> int:
        """Return N / TP, the number of heads of one rank.

        Raises:
            ValueError: N is not a multiple of TP.
        """
        check(is_positive_int(num_heads) and num_heads % self.tp_group.size == 0, "num_heads",
              f"a multiple of the {self.tp_group.size} ranks of tp_group", num_heads)  # fmt: skip
        return num_heads // self.tp_group.size

    def local_config(self, config: MLAConfig) -> MLAConfig:
        """Return the config with N / TP heads, the heads of this rank.

        Raises:
            ValueError: N is not a multiple of TP.
        """
        check_type("config", config, MLAConfig)
        return replace(config, num_heads=self.local_heads(config.num_heads))

    def _members(self) -> tuple[int, ...]:
        """Return the ranks of `cp_group` as indices of `tp_group`."""
        return tuple(self.tp_group.members.index(member) for member in self.cp_group.members)

    def local_gqa_config(self, config: GQAConfig) -> GQAConfig:
        """Return the config of this rank: its query heads, and the KV heads of its cache (see `rank_config`)."""
        return rank_config(config, self.tp_group.size, self._members(), self.rank)

    def kv_heads(self, config: GQAConfig) -> tuple[int, ...]:
        """Return the KV heads of the cache of this rank, out of the Nkv KV heads of a layer (`kv_heads_of_ranks`)."""
        return kv_heads_of_ranks(config, self.tp_group.size, self._members())

    def largest(self, value: Tensor) -> Tensor:
        """Return the largest of the scalars `value` of all ranks of `cp_group`, with the same bits on every rank."""
        return self.cp_group.all_gather(value.view(1)).amax()

    def largest_of_heads(self, value: Tensor) -> Tensor:
        """Return the largest of the scalars `value` of all ranks of `tp_group`, which together have all heads."""
        return self.tp_group.all_gather(value.view(1)).amax()

    def own_heads(self, x: Tensor) -> Tensor:
        """Return a view of the N / TP elements of `x` [N] that belong to the heads of this rank."""
        return x.view(self.tp_group.size, -1)[self.tp_group.rank]

    def heads_of_group(self, x: Tensor) -> Tensor:
        """Return the elements of `x` [N] for the N D / TP heads of the gathered queries, in the order of the heads."""
        return torch.cat([x.view(self.tp_group.size, -1)[member] for member in self._members()])

    def shard_linear(self, name: str, linear: nn.Module, dim: int, num_heads: int) -> nn.Linear:
        """Return a linear with this rank's heads of the projection `linear`; the new weight is a view, not a copy.

        If `tp_group` has one rank, the result is `linear` itself.

        Args:
            name: name of the projection in error messages.
            linear: plain linear without bias. The rows (`dim` 0) or columns (`dim` 1) of its weight are N heads of
                equal width.
            dim: dimension of the weight that contains the heads.
            num_heads: N.

        Raises:
            UnsupportedConfiguration: the linear is wrapped, hooked or quantised, or has a bias.
            ValueError: N is not a multiple of TP, or dimension `dim` of the weight is not a multiple of N.
        """
        local_heads = self.local_heads(num_heads)
        if self.tp_group.size == 1:
            return linear
        traits = {
            " with a bias": getattr(linear, "bias", None) is not None,
            " with hooks": bool(linear._forward_hooks or linear._forward_pre_hooks),
            " with a forward of its own": "forward" in linear.__dict__,
            " with parametrized weights": hasattr(linear, "parametrizations"),
        }
        found = [trait for trait, present in traits.items() if present]
        if type(linear) is not nn.Linear or found:
            got = type(linear).__name__ + "".join(found)
            raise UnsupportedConfiguration(
                [f"{name}: expected a plain linear without bias, because ranks divide its heads, got {got}"]
            )
        check(linear.weight.shape[dim] % num_heads == 0, name, f"a weight of {num_heads} heads in dimension {dim}",
              list(linear.weight.shape))  # fmt: skip
        width = linear.weight.shape[dim] // num_heads * local_heads
        weight = linear.weight.detach().narrow(dim, self.tp_group.rank * width, width)
        sharded = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=weight.dtype)
        sharded.weight = nn.Parameter(weight, requires_grad=False)
        return sharded.train(linear.training)

    def gathered_heads(self, num_heads: int) -> int:
        """Return N D / TP, the number of heads whose queries a rank has in a decode.

        Raises:
            ValueError: N is not a multiple of TP.
        """
        return self.local_heads(num_heads) * self.size


def verify_group(context_parallel: ContextParallel, **facts: Any) -> None:
    """Check that all ranks have the same settings: D, the interleave, the merge, and the settings in `facts`.

    Call this function once at the start, on every rank of `tp_group`, with the same names in `facts`.

    Args:
        context_parallel: the groups.
        facts: further settings by name, such as block_size=64, dtype=torch.bfloat16, seq_lens=[...]. The values must
            support pickle and ==.

    Raises:
        ValueError: a rank has a different value. Every rank raises; the message names the setting, the value of most
            ranks, and the ranks that differ.
        GroupError: a rank did not answer.
    """
    check_type("context_parallel", context_parallel, ContextParallel)
    cp, tp = context_parallel.cp_group, context_parallel.tp_group
    mine = {"context_parallel_size": cp.size, "interleave": context_parallel.interleave,
            "merge": context_parallel.merge, **facts}  # fmt: skip
    said = dict(zip(tp.members, tp.all_gather_object((mine, cp.members)), strict=True))
    for name in dict.fromkeys(name for found, _ in said.values() for name in found):
        values = [found.get(name, "nothing") for found, _ in said.values()]
        wanted = max(values, key=values.count)  # the most frequent value; among equally frequent values the first
        different = {member: value for member, value in zip(said, values, strict=True) if value != wanted}
        got = ", ".join(f"{value} on rank {member}" for member, value in different.items())
        check(not different, name, f"{wanted} on every rank", got)
    for member, (_, members) in said.items():
        for other in members:
            theirs = said[other][1] if other in said else ()
            check(theirs == members, "cp_group", f"ranks {list(members)} on rank {other}, as on rank {member}",
                  list(theirs))  # fmt: skip
