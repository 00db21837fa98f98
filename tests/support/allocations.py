"""Dispatch modes of PyTorch that record how much memory a computation holds, and which ops write to a tensor.

A custom op counts as one op. So the modes do not see memory that a custom op allocates and frees again.
"""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensors_of(*values) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class HeldMemory(TorchDispatchMode):
    """Record the bytes of all storages that were allocated under this mode and are still in use.

    Attributes:
        peak: largest number of bytes after any op since the last call of `reset`.
    """

    def __init__(self):
        super().__init__()
        self.own: dict[int, tuple[StorageWeakRef, int]] = {}
        self.foreign: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._forget_freed()
        for tensor in tensors_of(args, kwargs):
            reference = StorageWeakRef(tensor.untyped_storage())
            if reference.cdata not in self.own:
                self.foreign[reference.cdata] = reference
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_of(result):
            storage = tensor.untyped_storage()
            reference = StorageWeakRef(storage)
            if reference.cdata not in self.foreign:
                self.own[reference.cdata] = reference, storage.nbytes()
        self.peak = max(self.peak, self.held)
        return result

    def _forget_freed(self) -> None:
        self.own = {key: found for key, found in self.own.items() if not found[0].expired()}
        self.foreign = {key: found for key, found in self.foreign.items() if not found.expired()}

    @property
    def held(self) -> int:
        """The bytes that are in use now."""
        self._forget_freed()
        return sum(size for _, size in self.own.values())

    def reset(self) -> None:
        """Set the peak to the bytes that are in use now."""
        self.peak = self.held


class Calls(TorchDispatchMode):
    """Record the calls of ops, and the tensors that an op writes.

    Attributes:
        made: (name of the op, arguments, written tensors) of each call.
    """

    def __init__(self):
        super().__init__()
        self.made: list[tuple[str, tuple, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        schema = func._schema.arguments
        given = [*zip(schema, args, strict=False), *((a, kwargs[a.name]) for a in schema if a.name in kwargs)]
        written = [value for argument, value in given if argument.alias_info is not None and
                   argument.alias_info.is_write and isinstance(value, torch.Tensor)]  # fmt: skip
        self.made.append((func.overloadpacket.__name__, args, written))
        return func(*args, **kwargs)

    def named(self, name: str) -> list[tuple]:
        """Return the arguments of every call of an op."""
        return [args for made, args, _ in self.made if made == name]

    def writes(self, tensor: torch.Tensor) -> list[tuple[str, int]]:
        """Return (name, number of written elements) for each op that wrote to a tensor or to a part of it."""
        first = tensor.untyped_storage().data_ptr()
        return [(name, each.numel()) for name, _, written in self.made for each in written
                if each.untyped_storage().data_ptr() == first and each.numel() > 0]  # fmt: skip
