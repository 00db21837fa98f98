"""Checks of the machine code of compiled kernels: spills, serialised products, and arrivals at mbarriers.

A kernel that fails one of these checks can still give right results: it is only slower, or wrong once in a while. So
no test of results finds these faults.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from .barrier_memory import unused, used_again

# ptxas's warnings that it serialised matrix products; C7517 says only that it added a wait for one of them
SERIALISED = re.compile(r"serialized|\bC751[0-4]\b")


def run(tool: str, *arguments: str | Path) -> str:
    """Run a tool of Triton's copy of the CUDA toolkit, such as ptxas; return what it prints."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    done = subprocess.run([tools / tool, *arguments], capture_output=True, text=True, check=True, timeout=300)
    return done.stdout + done.stderr


def product_loops(disassembly: str, product: str = "GMMA") -> list[list[str]]:
    """Return the instructions of each innermost loop that contains a product, such as HGMMA or QGMMA (e4m3)."""
    instructions, labels = [], {}
    for line in disassembly.splitlines():
        if found := re.match(r"\s*(\.L\w+):", line):
            labels[found.group(1)] = len(instructions)
        elif found := re.search(r"/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(found.group(1))
    loops = []
    for end, text in enumerate(instructions):
        found = re.search(r"\bBRA\b.*`\((\.L\w+)\)", text)
        if text.startswith("BRA `"):  # an unconditional jump back belongs to a wait on a barrier, not to a loop
            continue
        if found and labels.get(found.group(1), end + 1) <= end:
            loops.append((labels[found.group(1)], end))
    multiply = [(a, b) for a, b in set(loops) if any(re.search(product, text) for text in instructions[a : b + 1])]
    innermost = [(a, b) for a, b in multiply
                 if not any(a <= c and d <= b and (c, d) != (a, b) for c, d in multiply)]  # fmt: skip
    return [instructions[a : b + 1] for a, b in sorted(innermost)]


def arrivals_for_all(ptx: str) -> list[list[str]]:
    """Return the instructions before each arrival that one thread makes at an mbarrier for its whole warp group.

    Each list has the instructions since the previous arrival of this kind.
    """
    groups: list[list[str]] = [[]]
    for line in map(str.strip, ptx.splitlines()):
        if re.match(r"@%p\d+ mbarrier\.arrive\.shared", line):
            groups.append([])
        elif line and not re.match(r"\.(loc|file)|//|\$L__tmp", line):
            groups[-1].append(line)
    return groups[:-1]


def all_have_met(before: list[str]) -> bool:
    """Return whether a barrier of the warp group follows the last memory access or fence in these instructions."""
    for line in reversed(before):
        if re.match(r"bar\.(sync|warp\.sync)\b", line):
            return True
        if re.search(r"^\$L|\bbra\b|\b(ld|st)\.(shared|global)|ldmatrix|stmatrix|wgmma|cp\.async|fence\.proxy", line):
            return False
    return False


def local_accesses(loop: list[str]) -> int:
    """Return how many instructions of a loop access local memory, where spilled registers are."""
    return len([text for text in loop if re.search(r"\b(LDL|STL)\b", text)])


def check_assembly(kernel, folder: Path) -> str:
    """Check what holds for every kernel of matrix products for Hopper, and return the messages of the assembler.

    - The assembler serialises no matrix product.
    - One thread arrives for its warp group only after a barrier of the group.
    - Every mbarrier is used, and no other data begin at its address.

    Args:
        kernel: compiled kernel.
        folder: folder that receives the files kernel.cubin, kernel.ptx and again.cubin.
    """
    (folder / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    (folder / "kernel.ptx").write_text(kernel.asm["ptx"])
    messages = run("ptxas", "-v", "-arch=sm_90a", "-o", folder / "again.cubin", folder / "kernel.ptx")
    assert not SERIALISED.search(messages), messages
    arrivals = arrivals_for_all(kernel.asm["ptx"])
    assert arrivals and all(map(all_have_met, arrivals))
    assert unused(kernel.asm["ptx"]) == used_again(kernel.asm["ptx"]) == []
    return messages


def check_machine_code(kernel, folder: Path, most_shared: int, most_local: dict[str, int]) -> None:
    """Check a decode kernel with two consumers: `check_assembly`, its shared memory, and the spills of its loops.

    Args:
        kernel: compiled kernel.
        folder: folder for files, as in `check_assembly`.
        most_shared: bytes of shared memory that a program can have.
        most_local: for each pattern of an instruction, the largest number of accesses to local memory in a loop. The
            loops are the innermost loops that contain such an instruction, and a matrix product; there must be one loop
            for each consumer.
    """
    assert kernel.metadata.shared <= most_shared
    check_assembly(kernel, folder)
    disassembly = run("nvdisasm", "-c", folder / "kernel.cubin")
    for pattern, allowed in most_local.items():
        loops = [loop for loop in product_loops(disassembly, pattern) if any("GMMA" in text for text in loop)]
        assert len(loops) == 2, pattern
        assert max(map(local_accesses, loops)) <= allowed, pattern
