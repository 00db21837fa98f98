"""Find mbarriers that a compiled kernel does not use, and memory of mbarriers that it also uses for other data.

PTX forbids other data at the address of an mbarrier, unless `mbarrier.inval` comes first. Triton reuses the shared
memory of a tensor behind its last use, and a barrier that is only initialised has its last use at once. On an H200,
sums over warps were then wrong in about one of 10000 decodes, but only while other processes used the same GPU: the
first row of a request got an output with other bits, or NaN (docs/log.md).

An address in PTX is a register plus a constant. The functions follow additions and copies of registers and add up the
constants; a value that depends on the thread or on a loop counts as 0. They therefore know where an access begins in
the memory of a kernel, but not how far it reaches. They read no copies by TMA and no operands of matrix products. If
they cannot read the address of an instruction, they raise a ValueError, so that a new form of PTX cannot hide a fault.
"""

from __future__ import annotations

import re

BARRIER_BYTES = 8
# `ld.shared.b8` reads the state of `warp_specialize`: its address is a constant plus 4 or more, the number of the warp.
OTHER_DATA = re.compile(r"\bld\.shared\.(?!b8\b)|\bst\.shared\.|\b(?:st|ld)matrix\.|\bcp\.async\.c[ag]\.")
USES = re.compile(r"mbarrier\.(?!init)|cp\.async\.bulk\.tensor")
ADDRESS = re.compile(r"\[\s*(%r\d+|global_smem)\s*(?:\+\s*(-?\d+))?\s*\]")
DEFINITION = re.compile(r"\b(?:add\.s32|or\.b32|mov\.b32|mov\.u32)\s+(%r\d+), ([^,;]+)(?:, ([^;]+))?;")


def used_again(ptx: str) -> list[int]:
    """Return the addresses in shared memory at which other data begin, although an mbarrier is there."""
    barriers, others, _ = _addresses(ptx)
    return sorted(each for each in others if any(0 <= each - barrier < BARRIER_BYTES for barrier in barriers))


def unused(ptx: str) -> list[int]:
    """Return the addresses of mbarriers that are initialised, but that no other instruction uses.

    In an array of barriers, instructions with an index have the address of the first barrier. A barrier therefore
    counts as used if a barrier directly in front of it counts as used.
    """
    barriers, _, uses = _addresses(ptx)
    found = []
    for barrier in sorted(barriers):
        first = barrier
        while first not in uses and first - BARRIER_BYTES in barriers:
            first -= BARRIER_BYTES
        if first not in uses:
            found.append(barrier)
    return found


def _addresses(ptx: str) -> tuple[set[int], set[int], set[int]]:
    """Return the addresses of initialised barriers, of accesses to other data, and of other uses of barriers.

    Raises:
        ValueError: an instruction has no address of a known form, or two barriers seem to have the same address.
    """
    lines = ptx.splitlines()
    definitions: dict[str, list[tuple[str, ...]]] = {}
    for line in lines:
        for name, *parts in DEFINITION.findall(line):
            definitions.setdefault(name, []).append(tuple(part.strip() for part in parts if part))

    def constants(name: str, seen: tuple[str, ...] = ()) -> set[int]:
        if re.fullmatch(r"-?\d+", name):
            return {int(name)}
        if name in seen or name not in definitions:
            return {0}
        found = set()
        for parts in definitions[name]:
            sums = {0}
            for part in parts:
                sums = {before + each for before in sums for each in constants(part, (*seen, name))}
            found |= sums
        return found

    known: dict[str, set[int]] = {}

    def addresses(pattern: str | re.Pattern) -> set[int]:
        found = set()
        for line in lines:
            if re.search(pattern, line):
                if not (places := ADDRESS.findall(line)):
                    raise ValueError(f"no known address: {line.strip()}")
                for register, offset in places:
                    if register not in known:
                        known[register] = constants(register)
                    found |= {each + int(offset or 0) for each in known[register]}
        return found

    barriers = addresses(r"mbarrier\.init")
    if len(barriers) != (count := sum("mbarrier.init" in line for line in lines)):
        raise ValueError(f"{count} barriers, but {len(barriers)} addresses")
    return barriers, addresses(OTHER_DATA), addresses(USES)
