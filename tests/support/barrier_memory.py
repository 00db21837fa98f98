"""Find memory of mbarriers that a compiled kernel also uses for other data.

PTX forbids other data at the address of an mbarrier, unless `mbarrier.inval` comes first. Triton reuses the shared
memory of a tensor behind its last use, and a barrier that is only initialised has its last use at once. On an H200,
sums over warps were then wrong in about one of 10000 decodes, but only while other processes used the same GPU: the
first row of a request got an output with other bits, or NaN (docs/log.md).
"""

from __future__ import annotations

import re

BARRIER_BYTES = 8
OTHER_DATA = re.compile(r"\b(?:ld|st)\.shared\.(?!b8\b)|\b(?:st|ld)matrix\.|\bcp\.async\.c[ag]\.")
# `ld.shared.b8` reads the state of `warp_specialize`: its address is a constant plus 4 or more, the number of the warp.


def used_again(ptx: str) -> list[int]:
    """Return the addresses in shared memory at which an mbarrier is initialised, and at which other data begin.

    The address of an access is known up to a value in a register, such as an offset of the thread. The function
    compares the constant part. It therefore finds data that begin at a barrier, but no data that begin in front of one.
    """
    constants = {found[1]: int(found[2]) for found in re.finditer(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx)}

    def addresses(line: str) -> list[int]:
        found = re.findall(r"\[\s*(%r\d+|global_smem)\s*(?:\+\s*(\d+))?\s*\]", line)
        return [int(offset or 0) or constants.get(register, 0) for register, offset in found]

    lines = ptx.splitlines()
    barriers = {each for line in lines if "mbarrier.init" in line for each in addresses(line)}
    others = {each for line in lines if OTHER_DATA.search(line) for each in addresses(line)}
    return sorted(each for each in others if any(0 <= each - barrier < BARRIER_BYTES for barrier in barriers))
