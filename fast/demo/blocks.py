"""Allocator of the blocks of a paged cache, for the serving loop of the main job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from reference.interfaces import check, check_int, check_type


def check_order(argument: str, order: Sequence[int] | None, num_blocks: int) -> None:
    """Raise ValueError unless `order` is None or a permutation of the block ids 0 .. num_blocks - 1."""
    wanted = f"a permutation of {num_blocks} blocks"
    check_type(argument, order, (Sequence, type(None)), wanted)
    known = order is None or all(type(block) is int for block in order)
    fits = known and (order is None or sorted(order) == list(range(num_blocks)))
    check(fits, argument, wanted, None if order is None else list(order[:8]))


class BlockAllocator:
    """Allocator of the blocks of a paged cache, with a list of free blocks.

    Args:
        num_blocks: number of blocks, at least 1.
        order: block ids in the order of first use; None means the ascending order.

    Raises:
        ValueError: `num_blocks` is below 1, or `order` is not a permutation of the ids.
    """

    def __init__(self, num_blocks: int, order: Sequence[int] | None = None):
        check_int("num_blocks", num_blocks, 1, "at least 1")
        check_order("order", order, num_blocks)
        order = list(range(num_blocks) if order is None else order)
        self.num_blocks = num_blocks
        self._free = order[::-1]
        self._is_free = [True] * num_blocks

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    @property
    def free_blocks(self) -> list[int]:
        """Ids of the free blocks, which belong to no request."""
        return list(self._free)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks and return their ids.

        Raises:
            ValueError: fewer than `count` blocks are free; no block is then allocated.
        """
        check_int("count", count, 0)
        check(0 <= count <= self.num_free, "count", f"at most the {self.num_free} free blocks", count)
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._is_free[block] = False
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Free blocks.

        Raises:
            ValueError: a block does not exist, is already free, or is given twice; no block is then freed.
        """
        given = isinstance(blocks, Iterable) and not isinstance(blocks, Tensor)
        check(given, "blocks", "ids of blocks", type(blocks).__name__)
        blocks = list(blocks)
        check(all(isinstance(block, int) for block in blocks), "blocks", "ids of blocks", blocks)
        check(len(set(blocks)) == len(blocks), "blocks", "distinct blocks", blocks)
        for block in blocks:
            check(0 <= block < self.num_blocks, "blocks", f"ids in [0, {self.num_blocks})", block)
            check(not self._is_free[block], "blocks", "blocks that are in use", f"block {block}, which is free")
        for block in reversed(blocks):
            self._is_free[block] = True
            self._free.append(block)
