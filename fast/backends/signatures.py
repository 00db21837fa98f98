"""The signature of a call: everything that the checks and the choice of a backend read from the arguments.

A signature has the shape, strides, dtype, device and alignment of each tensor, and the type and value of every other
argument. Values inside tensors are not part of it. `checked_calls` explains what signatures are for.

A record is a frozen dataclass. A token is an object that stands for a record in a signature.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .selection import BoundOps

MOST_CONFIGS = 4096  # configs that are kept in `_CONFIGS`
MOST_RECORDS = 4096  # signatures that are kept in `_RECORD_TOKENS`; every step of a decode can add one
_WHEN_FULL: list[Callable[[], None]] = []


class NoSignature(Exception):
    """An argument has no signature."""


def signature_of(arguments: tuple) -> tuple:
    """Return the signature of some arguments.

    Raises:
        NoSignature: an argument is a subclass of `Tensor`, or a mapping that `bind` has not checked.
    """
    return tuple([_PART_OF.get(type(argument), _part_of_new_kind)(argument) for argument in arguments])


def part_of(tensor: Tensor) -> tuple:
    """Return the signature of a tensor.

    Raises:
        NoSignature: the tensor is an object of a subclass of `Tensor`.
    """
    part = _PART_OF.get(type(tensor))
    if part is None:
        raise NoSignature
    return part(tensor)


def when_full(function: Callable[[], None]) -> None:
    """Call a function when MOST_CONFIGS records are kept; it must call `forget_configs`."""
    _WHEN_FULL.append(function)


def forget_configs() -> None:
    """Forget the tokens of all records without tensors; all signatures with such a token must be forgotten too."""
    _CONFIGS.clear()
    _CONFIG_TOKENS.clear()


def _part_of_tensor(tensor: Tensor) -> tuple:
    return (
        tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, tensor.data_ptr() % 16,
        tensor.is_neg(),
    )  # fmt: skip


def _part_of_value(value: Any) -> tuple:
    return type(value), value  # True and 1 are equal, but a check may allow only one of them


def _part_of_bound_ops(bound: BoundOps) -> tuple:
    return bound.pairs


_RECORDS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # from a record with tensors to its token
_RECORD_TOKENS: dict[tuple, object] = {}  # from the signature of a record with tensors to its token
_CONFIGS: dict[int, tuple[Any, object]] = {}  # from the id of a record without tensors to the record and its token
_CONFIG_TOKENS: dict[tuple[Any, str], object] = {}  # from a record without tensors, and its text, to its token


def _part_of_record(record: Any) -> object:
    """Return a token in place of a frozen record with tensors, such as a plan; equal signatures have the same token.

    The signature of a record is computed and hashed only once, because hashing takes several microseconds.
    """
    token = _RECORDS.get(record)
    if token is None:
        fields = tuple([getattr(record, field.name) for field in dataclasses.fields(record)])
        signature = type(record), needs_dispatcher(fields, True), signature_of(fields)
        if len(_RECORD_TOKENS) >= MOST_RECORDS:  # equal signatures then get a new token, and are checked once more
            _RECORD_TOKENS.pop(next(iter(_RECORD_TOKENS)), None)
        token = _RECORDS[record] = _RECORD_TOKENS.setdefault(signature, object())
    return token


def _part_of_config(config: Any) -> tuple:
    """Return a token in place of a frozen record without tensors; records of equal value have the same token.

    The fields of a record are hashed only once, because hashing takes longer than a check. `_CONFIGS` keeps the record
    alive, so that no other record can get its id. Records with 1 and with 1.0 are equal but need different tokens, so a
    key of `_CONFIG_TOKENS` also has the text (`repr`) of the record.
    """
    kept = _CONFIGS.get(id(config))
    if kept is None:
        if len(_CONFIGS) >= MOST_CONFIGS:
            for function in _WHEN_FULL:
                function()
        kept = _CONFIGS[id(config)] = config, _CONFIG_TOKENS.setdefault((config, repr(config)), object())
    return type(config), kept[1]


def _part_of_named_tuple(values: tuple) -> tuple:
    return type(values), signature_of(values)


def _part_of_tuple(values: tuple) -> tuple:
    if any(isinstance(value, Tensor) for value in values):
        return tuple, signature_of(values)
    return tuple, values


def _no_part(argument: Any) -> tuple:
    raise NoSignature


_PART_OF: dict[type, Callable[[Any], Any]] = {
    Tensor: _part_of_tensor,
    torch.nn.Parameter: _part_of_tensor,
    BoundOps: _part_of_bound_ops,
    tuple: _part_of_tuple,
}


def _part_of_new_kind(argument: Any) -> Any:
    """Return the signature of an argument of a new type, and keep the function that computes it for this type."""
    kind = type(argument)
    _PART_OF[kind] = _part_for(kind)
    return _PART_OF[kind](argument)


def _part_for(kind: type) -> Callable[[Any], Any]:
    """Return the function that computes the signature of an argument of the type `kind`."""
    if issubclass(kind, (Tensor, dict, list)):
        return _no_part
    if hasattr(kind, "_fields"):
        return _part_of_named_tuple
    if not dataclasses.is_dataclass(kind):
        return _part_of_value
    frozen, compared = kind.__dataclass_params__.frozen, kind.__dataclass_params__.eq
    return _no_part if not frozen else _part_of_config if compared else _part_of_record


_TOKENS: dict[int, tuple[weakref.ref, object]] = {}  # from the id of a record with tensors to the record and its token


def _token_of(record: Any) -> object:
    """Return a token in place of a record with tensors; the token does not keep the record alive."""
    number = id(record)
    kept = _TOKENS.get(number)
    if kept is None or kept[0]() is not record:  # a new record may have the id of a freed one
        kept = _TOKENS[number] = weakref.ref(record, functools.partial(_forget_token, number)), object()
    return kept[1]


def _forget_token(number: int, freed: weakref.ref) -> None:
    """Drop the token of a freed record, unless a new record with the same id has a token already."""
    kept = _TOKENS.get(number)
    if kept is not None and kept[0] is freed:
        _TOKENS.pop(number, None)


_IDENTITY_OF = dict(_PART_OF)


def identity_of(arguments: tuple) -> tuple:
    """Return the signature of some arguments, with a token in place of each record with tensors.

    Raises:
        NoSignature: as in `signature_of`.
    """
    return tuple([_IDENTITY_OF.get(type(each), _identity_of_new_kind)(each) for each in arguments])


def _identity_of_new_kind(argument: Any) -> Any:
    """Compute `identity_of` for one argument of a new type, and keep the function that computes it for this type."""
    kind = type(argument)
    part = _part_for(kind)
    _IDENTITY_OF[kind] = _token_of if part is _part_of_record else part
    return _IDENTITY_OF[kind](argument)


def needs_dispatcher(arguments: tuple, grad: bool) -> bool:
    """Return whether a tensor needs torch's dispatcher: it needs a gradient, or is a negated view or a meta tensor."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            if argument.is_neg() or argument.is_meta or (grad and argument.requires_grad):
                return True
        elif isinstance(argument, tuple) and needs_dispatcher(argument, grad):
            return True
        elif dataclasses.is_dataclass(argument) and type(argument).__eq__ is object.__eq__:
            fields = tuple([getattr(argument, field.name) for field in dataclasses.fields(argument)])
            if needs_dispatcher(fields, grad):
                return True
    return False
