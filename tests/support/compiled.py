"""Kernel launches that are recorded instead of run, and compiled for a chip that need not be here."""

from __future__ import annotations

import torch

OPTIONS = ("num_warps", "num_stages", "launch_pdl", "launch_cooperative_grid")  # what is no parameter of the kernel
TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int16: "i16", torch.int32: "i32",
    torch.int64: "i64",
}  # fmt: skip


class Kind(tuple):
    """Triton's type of an argument and whether 16 divides it; for a constant ("constexpr", its value).

    The kind of a record is a record of kinds.
    """

    __slots__ = ()


class Recorded:
    """Stands for a kernel: a launch records what Triton would compile.

    Integers count as 1, as multiples of 16 or as others, pointers by type and alignment, as far as the kernel's own
    `do_not_specialize` lets them; constants by value. The fields of a record count like parameters, but Triton
    specialises every one of them: `do_not_specialize` does not reach them.
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
                raise TypeError(f"{parameter.name}: Triton specialises the fields of a record, whatever it is told")
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
    """The same for a Gluon kernel, whose descriptors carry the layout of their boxes."""

    @staticmethod
    def descriptor(value) -> str:
        return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)},{value.layout!r}>"


class Source:
    """What Triton compiles for a recorded launch.

    Attributes:
        signature: parameter name to Triton's type; a record's type is a record of types.
        constants: path (position of the parameter, then of the field) to value.
        attributes: path to what is known of the argument.
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
        """Return Triton's type of a kind, and keep what else the kind says under its path."""
        if not isinstance(kind, Kind):
            return type(kind)(*(self._type_of((*path, number), field) for number, field in enumerate(kind)))
        name, known = kind
        if name == "constexpr":
            self.constants[path] = known
        elif known:
            self.attributes[path] = [["tt.divisibility", 16]]
        return name

    def compile(self, capability: tuple[int, int]):
        """Return the kernel, compiled for a chip of this capability."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

        make = GluonASTSource if isinstance(self.kernel, GluonJITFunction) else ASTSource
        source = make(self.kernel, self.signature, self.constants, self.attributes)
        target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
        return triton.compile(source, target=target, options=self.options)


def compiled(kernel, kinds: dict, constants: dict, capability: tuple[int, int] = (9, 0)):
    """Return a recorded launch, compiled for a chip that need not be here.

    Args:
        kernel: the kernel.
        kinds: parameter name to kind, of the positional arguments.
        constants: keyword arguments of the launch: constants and options.
        capability: compute capability of the chip.
    """
    return Source(kernel, kinds, constants).compile(capability)
