"""Make Triton's interpreter faster without a change of what a kernel computes or which of its errors are found.

The interpreter builds Python objects for the type of every value, and most of its time goes into these objects. The
functions below keep what depends only on a type or on a module.
"""

from __future__ import annotations

import builtins
import dataclasses
import math
import types

from triton.language import core
from triton.runtime import interpreter


def make_interpreter_faster() -> None:
    """Replace the slow functions of the interpreter; the process keeps the replacements until it ends."""
    replace_language_once_a_launch()
    skip_discarded_overflow_checks()
    keep_numpy_types()
    keep_shapes()


def replace_language_once_a_launch() -> None:
    """Let the interpreter replace the functions of `triton.language` once for a launch, not in every function call.

    For each call of a device function, the interpreter looks at every name of `triton.language`, and finds that it has
    replaced all of them at the start of the launch, or in an earlier call of the launch.
    """
    replace_language, replaced = interpreter._patch_lang, set()  # modules that the current launch has replaced
    languages: dict[int, set[int]] = {}  # id of a module's variables: the modules of Triton's language among them

    def language_of(variables: dict) -> set[int]:
        modules = {id(each) for each in variables.values() if isinstance(each, types.ModuleType)}
        return modules & {id(interpreter.tl), id(interpreter.tl.core)}

    def replace_missing(function):
        key = id(function.__globals__)
        if key not in languages:
            languages[key] = language_of(function.__globals__)
        if replaced and languages[key] <= replaced:
            return interpreter._LangPatchScope()  # nothing to restore
        is_launch, scope = not replaced, replace_language(function)
        replaced.update(languages[key])  # the interpreter does not undo what a call of a device function replaced
        if is_launch:
            restore = scope.restore
            scope.restore = lambda: (replaced.clear(), restore())
        return scope

    interpreter._patch_lang = replace_missing


def skip_discarded_overflow_checks() -> None:
    """Leave out the checks of integer additions and products for overflow if the interpreter discards their results.

    The interpreter computes these checks in int64 for every addition. It raises an error only in debug mode.
    """
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def keep_numpy_types() -> None:
    """Keep the NumPy type of each Triton type; the interpreter builds a table of all types for every look-up."""
    numpy_type_of, known = interpreter._get_np_dtype, {}

    def kept(tt_dtype):
        found = known.get(tt_dtype.name)
        if found is None:
            found = known[tt_dtype.name] = numpy_type_of(tt_dtype)
        return found

    interpreter._get_np_dtype = kept


def keep_shapes() -> None:
    """Keep the shape and the number of elements for each list of sizes; every value of a kernel has both."""
    init_block_type, blocks = core.block_type.__init__, {}  # sizes: (shape and numel of the type, text of the shape)
    tensors = {}  # sizes: (shape and numel of a tensor, as constants)

    def init_block(self, element_ty, shape):
        sizes = builtins.tuple(shape.values if isinstance(shape, core.tuple) else shape)
        if {*map(type, sizes)} == {int}:
            found = blocks.get(sizes)
            if found is not None:
                self.element_ty, (self.shape, self.numel, text) = element_ty, found
                self.name = f"<{text}, {element_ty}>"
                return
        init_block_type(self, element_ty, shape)
        blocks[builtins.tuple(self.shape.values)] = self.shape, self.numel, str(self.shape)

    def init_tensor(self, handle, type):
        sizes = builtins.tuple(type.shape.values) if type.is_block() else ()
        if sizes not in tensors:
            numel = core.constexpr(math.prod(sizes))
            tensors[sizes] = core.tuple([core.constexpr(size) for size in sizes]), numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = tensors[sizes]

    core.block_type.__init__ = init_block
    core.tensor.__init__ = init_tensor
