"""The free list of a paged cache: `serving` takes blocks from it and gives them back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from reference.interfaces import check, check_int, check_type


def check_order(argument: str, order: Sequence[int] | None, num_blocks: int) -> None:
    """Check the order of first use of the blocks of a cache; None is the ascending one."""
    wanted = f"a permutation of {num_blocks} blocks"
    check_type(argument, order, (Sequence, type(None)), wanted)
    known = order is None or all(type(block) is int for block in order)
    fits = known and (order is None or sorted(order) == list(range(num_blocks)))
    check(fits, argument, wanted, None if order is None else list(order[:8]))


class BlockAllocator:
    """Hands out the blocks of a paged cache from a free list.

    Args:
        num_blocks: how many there are, at least 1.
        order: the ids in the order of first use; ascending where None.

    Raises:
        ValueError: `num_blocks` below 1, or an `order` that is no permutation of the ids.
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
        """Blocks that can be allocated."""
        return len(self._free)

    @property
    def free_blocks(self) -> list[int]:
        """Their ids; the cache's bytes there belong to nobody."""
        return list(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks.

        Raises:
            ValueError: fewer are free; none is taken then.
        """
        check_int("count", count, 0)
        check(0 <= count <= self.num_free, "count", f"at most the {self.num_free} free blocks", count)
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._is_free[block] = False
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back.

        Raises:
            ValueError: a block that does not exist, is free already or is named twice; none is given back then.
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
