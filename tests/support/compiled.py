"""Record a kernel launch instead of running the kernel, and compile the kernel without a GPU.

A variant of a kernel is the kernel compiled for one combination of argument types and constants. The *kind* of an
argument contains all properties of the argument on which the variant depends.
"""

from __future__ import annotations

import re

import torch

# keyword arguments of Triton's launch
OPTIONS = ("num_warps", "num_stages", "launch_pdl", "launch_cooperative_grid", "maxnreg")
TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int16: "i16", torch.int32: "i32",
    torch.int64: "i64", torch.uint8: "u8",
}  # fmt: skip


class Kind(tuple):
    """Pair (Triton's type of an argument, whether 16 divides the argument), or ("constexpr", value) for a constant.

    The kind of a named tuple is a named tuple of kinds.
    """

    __slots__ = ()


def without_products(monkeypatch) -> None:
    """Let `torch.bmm` return zeros: recorded launches read no values, and a CPU computes slowly in bfloat16."""

    def zeros(a, b, *, out=None):
        return a.new_zeros(a.shape[0], a.shape[1], b.shape[2]) if out is None else out.zero_()

    monkeypatch.setattr(torch, "bmm", zeros)


class Recorded:
    """Substitute for a kernel: a launch only records the variant that Triton would compile.

    As in Triton, a variant depends on these properties of the arguments:

    - an integer: whether its value is 1, and whether 16 divides the value
    - a pointer: its type and its alignment
    - a constant: its value
    - a named tuple: these properties of each field

    If the kernel lists a parameter in `do_not_specialize`, a variant does not depend on the value of this parameter. A
    named tuple cannot be listed.
    """

    def __init__(self, kernel, launches: dict):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        def launch(*args, **constants):
            kinds = {p.name: self.kind(p, value) for p, value in zip(self.kernel.params, args, strict=False)}
            key = (self.kernel.fn.__name__, *kinds.items(), *sorted((k, str(v)) for k, v in constants.items()))
            self.launches[key] = (self.kernel, kinds, constants)

        return launch

    @classmethod
    def kind(cls, parameter, value):
        """Return the kind of an argument."""
        if hasattr(value, "_asdict"):
            if parameter.do_not_specialize or parameter.do_not_specialize_on_alignment:
                raise TypeError(f"{parameter.name}: Triton specialises the fields of a named tuple in every case")
            return type(value)(*(cls.kind(parameter, field) for field in value))
        if isinstance(value, torch.Tensor):
            aligned = not parameter.do_not_specialize_on_alignment and value.data_ptr() % 16 == 0
            return Kind(("*" + TYPES[value.dtype], aligned))
        if value is None or (value == 1 and isinstance(value, int) and not parameter.do_not_specialize):
            return Kind(("constexpr", value))
        if isinstance(value, int):
            return Kind(("i32", not parameter.do_not_specialize and value % 16 == 0))
        if isinstance(value, float):
            return Kind(("fp32", False))
        return Kind((cls.descriptor(value), False))

    @staticmethod
    def descriptor(value) -> str:
        """Return Triton's type of a tensor descriptor."""
        return f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape}>"


class RecordedGluon(Recorded):
    """Substitute for a Gluon kernel; in Gluon, the type of a tensor descriptor contains the layout of its blocks."""

    @staticmethod
    def descriptor(value) -> str:
        return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)},{value.layout!r}>"


class Source:
    """The variant that Triton compiles for a recorded launch.

    A path is a tuple: the position of a parameter, then the position of a field if the parameter is a named tuple.

    Attributes:
        signature: mapping from parameter name to Triton's type; a named tuple has a named tuple of types.
        constants: mapping from path to the value of a constant.
        attributes: mapping from path to Triton's attributes of an argument, such as "divisible by 16".
        options: options of the launch.
    """

    def __init__(self, kernel, kinds: dict, constants: dict):
        self.kernel = kernel
        self.options = {key: constants[key] for key in OPTIONS if key in constants}
        names = [parameter.name for parameter in kernel.params]
        values = {key: value for key, value in constants.items() if key not in self.options}
        self.constants = {(names.index(name),): value for name, value in values.items()}
        self.attributes: dict = {}
        self.signature = {
            name: "constexpr" if name in values else self._type_of((position,), kinds[name])
            for position, name in enumerate(names)
        }

    def _type_of(self, path: tuple, kind):
        """Return Triton's type of a kind; store a constant, or whether 16 divides the argument, under `path`."""
        if not isinstance(kind, Kind):
            return type(kind)(*(self._type_of((*path, number), field) for number, field in enumerate(kind)))
        name, known = kind
        if name == "constexpr":
            self.constants[path] = known
        elif known:
            self.attributes[path] = [["tt.divisibility", 16]]
        return name

    def compile(self, capability: tuple[int, int]):
        """Compile the kernel variant for a GPU of this compute capability and return the result."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

        make = GluonASTSource if isinstance(self.kernel, GluonJITFunction) else ASTSource
        source = make(self.kernel, self.signature, self.constants, self.attributes)
        target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
        return triton.compile(source, target=target, options=self.options)


def compiled(kernel, kinds: dict, constants: dict, capability: tuple[int, int] = (9, 0)):
    """Compile the kernel of a recorded launch and return the compiled kernel; no GPU is needed.

    Args:
        kernel: the kernel.
        kinds: mapping from the name of a positional argument to its kind.
        constants: keyword arguments of the launch: constants and options.
        capability: compute capability of the GPU for which the kernel is compiled.
    """
    return Source(kernel, kinds, constants).compile(capability)


def waiting_stores(ir: str, shape: str) -> list[int]:
    """Return, for every tensor that the kernel stores in shared memory, how often a store takes the same banks.

    A thread stores eight 16-bit numbers at a time, and eight threads store at once if each has banks of its own; then
    the result is 1. If pairs of these threads need the same banks, the result is 2, and a store takes twice as long.

    Args:
        ir: the kernel in Triton's GPU dialect.
        shape: rows, columns and element type of the tensors, such as "64x128xf16"; rows of at least 128 bytes, which
            shared memory holds in units of 16 bytes whose order depends on the row, as Triton's layouts do.
    """
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.(?:blocked|linear)<.*>)$", ir, re.M))
    names = re.findall(rf"ttg\.local_alloc %\S+ : \(tensor<{shape}, (#\w+)>\)", ir)
    return [_threads_of_a_bank(layouts[name]) for name in names if name in layouts]


def _threads_of_a_bank(layout: str) -> int:
    """Return how many of the first eight threads of a layout [row, column] store into the same banks, at most."""

    def pairs(name: str) -> list[list[int]]:
        (text,) = re.findall(rf"{name} = \[((?:\[[\d, ]*\](?:, )?)*)\]", layout)
        return [[int(number) for number in pair.split(",")] for pair in re.findall(r"\[([^\]]*)\]", text)]

    def numbers(name: str) -> list[int]:
        return [int(number) for number in re.findall(rf"{name} = \[([^\]]*)\]", layout)[0].split(",")]

    if "blocked" in layout:
        own, threads = numbers("sizePerThread"), numbers("threadsPerWarp")
        columns = [[0, own[1] << bit] for bit in range(threads[1].bit_length() - 1)]
        lanes = columns + [[own[0] << bit, 0] for bit in range(threads[0].bit_length() - 1)]
    else:
        lanes = pairs("lane")
    banks = []
    for thread in range(8):
        row = column = 0
        for bit, (rows, columns) in enumerate(lanes[:3]):
            if thread >> bit & 1:
                row, column = row ^ rows, column ^ columns
        banks.append(column // 8 % 8 ^ row % 8)
    return max(banks.count(bank) for bank in banks)
