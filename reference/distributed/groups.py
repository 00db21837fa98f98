"""Groups of ranks and what they exchange, over `torch.distributed` or within one process (`simulation`)."""

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


class Pending:
    """The result of an exchange that may still be under way.

    Args:
        result: what `wait` returns.
        finish: called once before; None where nothing is left to do.
    """

    def __init__(self, result: Tensor, finish: Callable[[], object] | None = None):
        self._result, self._finish = result, finish

    def wait(self) -> Tensor:
        """The result, for use on the current stream (NCCL) or at once (gloo)."""
        if self._finish is not None:
            self._finish()
            self._finish = None
        return self._result


class Group(ABC):
    """Ranks that exchange tensors. All call the same operations in the same order, on tensors of the same shapes.

    Attributes:
        name: what errors call it.
        size: how many ranks.
        rank: this one, in [0, size).
        members: global ranks, in order.
        received: bytes that this rank received so far, by operation, counted as the least that an exchange needs:
            everything of others for a gather and an all-to-all, one share of it for a reduce-scatter, both for an
            all-reduce. A graph that is replayed counts once, when it is captured.
        last_operation: the exchange that was begun last.
    """

    def __init__(self, name: str, size: int, rank: int, members: Sequence[int]):
        self.name, self.size, self.rank, self.members = name, size, rank, tuple(members)
        self.received: Counter[str] = Counter()
        self.last_operation = "none"

    @property
    def timeout_s(self) -> float | None:
        """Seconds after which an exchange fails; None where it cannot."""
        return None

    @property
    def fails_on_its_own(self) -> bool:
        """Whether an exchange with a dead rank raises where it was called."""
        return True

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[D, *x.shape], the tensors of all ranks; `out`, without gaps, where given."""
        return self.all_gather_async(x, out).wait()

    def all_gather_async(self, x: Tensor, out: Tensor | None = None) -> Pending:
        """As `all_gather`, under way while the caller goes on."""
        self._begin("all_gather", (self.size - 1) * _bytes(x))
        if out is None:
            out = x.new_empty(self.size, *x.shape)
        check_tensor("out", out, (self.size, *x.shape), (x.dtype,), x.device)
        check(out.is_contiguous(), "out", "a tensor without gaps", f"strides {out.stride()}")
        if self.size == 1 or x.numel() == 0:
            return Pending(out.copy_(x))
        return self._all_gather(x.contiguous(), out)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum over ranks of their x[rank]: [D, ...] to [...]."""
        self._check_parts("reduce_scatter", x)
        self._begin("reduce_scatter", (self.size - 1) * _bytes(x) // self.size)
        return x[0].clone() if self.size == 1 or x.numel() == 0 else self._reduce_scatter(x.contiguous())

    def all_to_all(self, x: Tensor) -> Tensor:
        """The x[rank] of all ranks: [D, ...] to [D, ...]."""
        self._check_parts("all_to_all", x)
        self._begin("all_to_all", (self.size - 1) * _bytes(x) // self.size)
        return x.clone() if self.size == 1 or x.numel() == 0 else self._all_to_all(x.contiguous())

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, the same bits on all of them; `x` may be overwritten, or be the result."""
        self._begin("all_reduce", 2 * (self.size - 1) * _bytes(x) // self.size)
        return x if self.size == 1 or x.numel() == 0 else self._all_reduce(x.contiguous())

    def all_gather_object(self, value: Any) -> list[Any]:
        """The values of all ranks; slow, for checks at the start."""
        self._begin("all_gather_object", 0)
        return [value] if self.size == 1 else self._all_gather_object(value)

    def _check_parts(self, operation: str, x: Tensor) -> None:
        check(x.dim() > 0 and x.shape[0] == self.size, operation, f"a part for each of {self.size} ranks",
              f"shape {list(x.shape)}")  # fmt: skip

    def _begin(self, operation: str, num_bytes: int) -> None:
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
    return x.numel() * x.element_size()


def _either(new: str, old: str) -> Callable[..., Any]:
    """A collective of torch.distributed by whichever name this version calls it."""
    return getattr(dist, new, None) or getattr(dist, old)


class ProcessRanks(Group):
    """The ranks of a process group of `torch.distributed`, which the caller made.

    An exchange that fails (a rank that died, a timeout) raises `GroupError`; with NCCL, where a launch returns before
    the exchange ends, PyTorch's own watchdog ends the process instead.

    Args:
        group: the process group, or a one-dimensional device mesh.
        name: what errors call it.

    Raises:
        TypeError: neither of them.
        ValueError: a mesh of several dimensions, or a process that is no member.
    """

    def __init__(self, group: Any, name: str):
        if hasattr(group, "get_group"):  # a DeviceMesh
            check(group.ndim == 1, name, "a device mesh of one dimension", f"{group.ndim} dimensions")
            group = group.get_group()
        outside = isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER
        check(not outside, name, "a group that this process is a member of", "another")
        if group is None or not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"{name}: expected a process group or a device mesh, got {type(group).__name__}")
        rank = dist.get_rank(group)
        check(rank >= 0, name, "a group that this process is a member of", "another")
        super().__init__(name, dist.get_world_size(group), rank, dist.get_process_group_ranks(group))
        self.group = group
        # "gloo", or "cpu:gloo,cuda:nccl", whatever the group was made with
        engines = dict(pair.rsplit(":", 1) for pair in dist.get_backend_config(group).split(","))
        self._is_nccl = engines.get("cuda") == "nccl"

    @property
    def timeout_s(self) -> float | None:
        """Seconds after which an exchange fails, as the group was made."""
        device = torch.device("cuda" if self._is_nccl else "cpu")
        return self.group._get_backend(device).options._timeout.total_seconds()

    @property
    def fails_on_its_own(self) -> bool:
        """False where tensors on a GPU go over NCCL: a GPU waits, and the host goes on."""
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
    """The groups of decode context parallelism: D ranks share each sequence, TP ranks share the heads.

    A rank has N / TP heads. For a decode the D ranks of `cp_group` gather each other's queries, N D / TP heads; each
    attends its own keys; the results are merged by LSE, each head on its owner rank. `o_proj` is summed over
    `tp_group`.

    Attributes:
        cp_group: a process group, a device mesh of one dimension, or a group of `simulate`; ranks that share sequences.
        tp_group: likewise; ranks that share heads, all of `cp_group` among them.
        interleave: I, tokens of a sequence in a row on one rank.
        merge: "a2a" (`cp_lse_a2a`) or "ag_rs" (`cp_lse_ag_out_rs`).
        ownership: which tokens lie here.

    Raises:
        TypeError: no groups.
        ValueError: a `cp_group` that is no subgroup of `tp_group`, or whose size does not divide it; another merge.
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
        """D."""
        return self.cp_group.size

    @property
    def rank(self) -> int:
        """Of `cp_group`."""
        return self.cp_group.rank

    def local_heads(self, num_heads: int) -> int:
        """N / TP, the heads of one rank.

        Raises:
            ValueError: TP does not divide N.
        """
        check(is_positive_int(num_heads) and num_heads % self.tp_group.size == 0, "num_heads",
              f"a multiple of the {self.tp_group.size} ranks of tp_group", num_heads)  # fmt: skip
        return num_heads // self.tp_group.size

    def local_config(self, config: MLAConfig) -> MLAConfig:
        """The config of this rank's heads.

        Raises:
            ValueError: TP does not divide N.
        """
        check_type("config", config, MLAConfig)
        return replace(config, num_heads=self.local_heads(config.num_heads))

    def shard_linear(self, name: str, linear: nn.Module, dim: int, num_heads: int) -> nn.Linear:
        """This rank's share of a projection that has heads; its weight is a view. With one rank the linear itself.

        Args:
            name: what errors call it.
            linear: a plain linear without bias whose rows (`dim` 0) or columns (1) are N heads of equal width.
            dim: of the weight, which has heads.
            num_heads: N.

        Raises:
            UnsupportedConfiguration: a wrapped, hooked or quantised linear, or one with a bias.
            ValueError: TP does not divide N, or N the weight.
        """
        ownership = self.local_heads(num_heads)
        if self.tp_group.size == 1:
            return linear
        traits = {
            " with a bias": getattr(linear, "bias", None) is not None,
            " with hooks": bool(linear._forward_hooks or linear._forward_pre_hooks),
            " with a forward of its own": "forward" in linear.__dict__,
            " with parametrized weights": hasattr(linear, "parametrizations"),
        }
        found = [trait for trait, there in traits.items() if there]
        if type(linear) is not nn.Linear or found:
            got = type(linear).__name__ + "".join(found)
            raise UnsupportedConfiguration([f"{name}: expected a plain linear without bias to share heads, got {got}"])
        check(linear.weight.shape[dim] % num_heads == 0, name, f"a weight of {num_heads} heads in dimension {dim}",
              list(linear.weight.shape))  # fmt: skip
        width = linear.weight.shape[dim] // num_heads * ownership
        weight = linear.weight.detach().narrow(dim, self.tp_group.rank * width, width)
        sharded = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=weight.dtype)
        sharded.weight = nn.Parameter(weight, requires_grad=False)
        return sharded.train(linear.training)

    def gathered_heads(self, num_heads: int) -> int:
        """N D / TP, the heads that a rank attends in a decode.

        Raises:
            ValueError: TP does not divide N.
        """
        return self.local_heads(num_heads) * self.size


def verify_group(context_parallel: ContextParallel, **facts: Any) -> None:
    """Check at the start that all ranks mean the same: D, I, the merge, and whatever else they must agree on.

    Every rank of `tp_group` calls it, with facts of the same names.

    Args:
        context_parallel: the groups.
        facts: such as block_size=64, dtype=torch.bfloat16, seq_lens=[..]: values that pickle and compare.

    Raises:
        ValueError: on every rank, where one differs; the line names the fact, what most ranks have, and who differs.
        GroupError: a rank did not answer.
    """
    check_type("context_parallel", context_parallel, ContextParallel)
    cp, tp = context_parallel.cp_group, context_parallel.tp_group
    mine = {"context_parallel_size": cp.size, "interleave": context_parallel.interleave,
            "merge": context_parallel.merge, **facts}  # fmt: skip
    said = dict(zip(tp.members, tp.all_gather_object((mine, cp.members)), strict=True))
    for name in dict.fromkeys(name for found, _ in said.values() for name in found):
        values = [found.get(name, "nothing") for found, _ in said.values()]
        wanted = max(values, key=values.count)  # of equally frequent ones that of the first rank
        different = {member: value for member, value in zip(said, values, strict=True) if value != wanted}
        got = ", ".join(f"{value} on rank {member}" for member, value in different.items())
        check(not different, name, f"{wanted} on every rank", got)
    for member, (_, members) in said.items():
        for other in members:
            theirs = said[other][1] if other in said else ()
            check(theirs == members, "cp_group", f"ranks {list(members)} on rank {other}, as on rank {member}",
                  list(theirs))  # fmt: skip
