"""Call an op past torch's dispatcher where nothing needs the dispatcher.

The first call of an op through the dispatcher imports torch's compiler, which takes more than a second. `checked_calls`
skips more: it also skips the checks of arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .signatures import needs_dispatcher


class DirectCalls:
    """The calls of one op, whose arguments its caller has checked.

    A call goes through the dispatcher under `torch.compile`, a dispatch mode, a functorch transform or a profiler, and
    if an argument is a tensor that needs a gradient, or a subclass of `Tensor` other than `Parameter`.

    Args:
        dispatched: the op in torch's dispatcher.
        launch: the Python function that implements the op, with the same arguments.
        mutates: positions of the arguments that the op writes in place; each is a tensor or a list of tensors.
    """

    def __init__(self, dispatched: Callable, launch: Callable, mutates: tuple[int, ...] = ()):
        self._dispatched, self._launch, self._mutates = dispatched, launch, mutates

    def __call__(self, *arguments: Any) -> Any:
        """Call the op and return its result."""
        tensors = tuple(_tensors_of(arguments))
        plain = all(type(each) in (Tensor, Parameter) for each in tensors)
        if not plain or is_watched() or needs_dispatcher(tensors, torch.is_grad_enabled()):
            return self._dispatched(*arguments)
        result = self._launch(*arguments)
        for written in _tensors_of([arguments[position] for position in self._mutates]):
            if not written.is_inference():
                torch.autograd.graph.increment_version(written)
        return result


def is_watched() -> bool:
    """Return whether torch watches every op now: the compiler, a dispatch mode, functorch or a profiler."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd._profiler_enabled()
    )


def _tensors_of(arguments: Sequence) -> list[Tensor]:
    """Return the tensors among the arguments and in lists and tuples among them."""
    found: list[Tensor] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):
            found += _tensors_of(argument)
    return found
