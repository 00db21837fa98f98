"""Malformed values for the arguments of a call, and a check whether a value has the type of an annotation."""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from reference.distributed.groups import ContextParallel
from reference.interfaces import DecodeMetadata, MLAConfig, PathCosts, TokenOwnership

from .factories import DIRECT, integers


class Anything:
    """An object of a type that no function accepts."""

    def __repr__(self) -> str:
        return "an object\nof two lines"


ANYTHING = Anything()


def scalars() -> dict[str, Any]:
    """Return values that a caller could pass by mistake for any argument; the keys are the names of the values."""
    return {
        "None": None,
        "a float": 3.5,
        "NaN": math.nan,
        "True": True,
        "-1": -1,
        "a huge int": 2**70,
        "a str": "text",
        "a list": [1, "two"],
        "a dict": {"one": 1},
        "an object": ANYTHING,
        "a class": Anything,
        "a 0-d tensor": torch.tensor(3),
        "a vector": torch.arange(3.0),
        "a config": DIRECT,
        "an ownership": TokenOwnership(1, 0),
        "a decode plan": DecodeMetadata(*(integers(1) for _ in dataclasses.fields(DecodeMetadata))),
        "a dtype of ints": torch.int8,
    }


def tensors(like: Tensor) -> dict[str, Tensor]:
    """Return tensors, by name, that differ from a good tensor in dtype, number of dimensions, layout or device.

    "a tensor of the other kind" has integers if the good tensor has floating-point numbers, and floating-point numbers
    if the good tensor has integers. PyTorch has no sparse and no nested tensors of 8-bit floats. So if the good tensor
    has 8-bit floats, the returned tensors are made from a float32 tensor of the same shape.
    """
    floating, stored = like.is_floating_point(), like.dtype
    # ones, because a sparse CSR tensor must have equally many zeros in each matrix of a batch
    like = torch.ones(like.shape) if stored == torch.float8_e4m3fn else like
    made = {
        "a bool tensor": like != 0,
        "a complex tensor": torch.zeros(like.shape, dtype=torch.complex64),
        "a tensor of the other kind": like.to(torch.int64 if floating else torch.float32),
        "a float8 tensor": torch.zeros(like.shape, dtype=torch.float8_e4m3fn),
        "a uint8 tensor": torch.zeros(like.shape, dtype=torch.uint8),
        "one more dimension": like[None],
        "a sparse COO tensor": like.to_sparse(),
        "a meta tensor": like.to("meta"),
        "a nested tensor": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]).to(like.dtype),
        "a jagged tensor": torch.nested.nested_tensor(
            [torch.zeros(2, 4), torch.zeros(3, 4)], layout=torch.jagged
        ).to(like.dtype),
    }  # fmt: skip
    if like.dtype == torch.bool:
        del made["a bool tensor"], made["a nested tensor"], made["a jagged tensor"]
    if stored == torch.float8_e4m3fn:
        del made["a float8 tensor"]
    if floating and like.dtype == torch.float32:
        made["a quantised tensor"] = torch.quantize_per_tensor(like.nan_to_num(0), 0.1, 0, torch.qint8)
    if like.dim() >= 2:
        made["a sparse CSR tensor"] = like.to_sparse_csr()
    return made


def admits(annotation: str, value: Any) -> bool:
    """Return whether a value has the type of an annotation.

    A call is allowed to accept a value of the right type. For any other value it must raise an error.
    """
    annotation = annotation.replace("BackendChoice", "str | Mapping[str, str] | None")
    for part in re.split(r"\s*\|\s*(?![^\[]*\])", annotation):
        kind = part.split("[")[0].strip()
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind in ("Any", "object") or (kind == "None" and value is None):
            return True
        if (kind == "int" and is_number and isinstance(value, int)) or (kind == "float" and is_number):
            return True
        if (kind == "bool" and isinstance(value, bool)) or (kind == "str" and isinstance(value, str)):
            return True
        if kind in ("torch.dtype", "torch.device") and isinstance(value, (torch.dtype, torch.device)):
            return kind == f"torch.{type(value).__name__}"
        if kind == "Callable" and callable(value):
            return True
        if kind in {base.__name__ for base in type(value).__mro__[:-1]} and not isinstance(value, Tensor):
            return True
    return False


def malformed(annotation: str, good: Any) -> Iterator[tuple[str, str, Any, bool]]:
    """Yield malformed variants of a good argument: the whole argument is replaced, or one of its fields or items.

    If a field of a dataclass is replaced and the constructor raises an error, the variant is left out.

    Yields:
        Four values: the path of the replaced field, such as ".decode.seq_lens" ("" for the argument itself), the name
        of the new value, the resulting argument, and whether the new value has the right type.
    """
    for label, value in scalars().items():
        if not (
            isinstance(good, bool | int | TokenOwnership | MLAConfig) and type(value) is type(good) and value == good
        ):
            yield "", label, value, admits(annotation, value)
    if isinstance(good, Tensor):
        for label, value in tensors(good).items():
            yield "", label, value, False
    elif dataclasses.is_dataclass(good) and not isinstance(good, enum.Enum | MLAConfig | PathCosts | ContextParallel):
        for field in dataclasses.fields(good):
            if not field.init:
                continue
            held = getattr(good, field.name)
            for path, label, value, well in malformed(str(field.type), held):
                try:
                    changed = dataclasses.replace(good, **{field.name: value})
                except (ValueError, TypeError):  # calls of the constructor itself test this error
                    continue
                yield f".{field.name}{path}", label, changed, well
    elif isinstance(good, list | tuple) and good and isinstance(good[0], Tensor):
        for path, label, value, _ in malformed("Tensor", good[0]):
            yield path, f"{label} among others", type(good)((value, *good[1:])), False
    elif isinstance(good, tuple) and good and dataclasses.is_dataclass(good[0]):
        for path, label, value, well in malformed(type(good[0]).__name__, good[0]):
            yield path, f"{label} among others", (value, *good[1:]), well
