"""Checks of one value or tensor at a time. Each raises one line: the argument, what was expected, what came."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import SupportsIndex

import torch
from torch import Tensor


def check(condition: bool, argument: str, expected: object, got: object) -> None:
    """Raise one line that names the argument, what was expected and what came."""
    if not condition:
        raise ValueError(f"{argument}: expected {expected}, got {_in_one_line(got)}")


def _in_one_line(got: object) -> str:
    """A value as text, or its type where the text has several lines or is long."""
    if isinstance(got, Tensor):
        return type(got).__name__
    text = str(got)
    if isinstance(got, str):
        return " ".join(text.splitlines())
    return text if len(text) <= 500 and "\n" not in text else type(got).__name__


def short_text(value: object) -> str:
    """Return `repr(value)` in one line, cut after 60 characters: a list may have an entry for every layer."""
    text = " ".join(repr(value).splitlines())
    return text if len(text) <= 60 else f"{text[:60]}..."


def check_type(argument: str, value: object, kind: type | tuple[type, ...], expected: str | None = None) -> None:
    """Check the class of an argument; `expected` says what is wanted where the name of the class does not.

    Raises:
        TypeError: another class; one line.
    """
    if not isinstance(value, kind):
        if expected is None:
            name = kind.__name__ if isinstance(kind, type) else " or ".join(one.__name__ for one in kind)
            expected = f"{'an' if name.startswith(('A', 'O', 'MLA')) else 'a'} {name}"
        raise TypeError(f"{argument}: expected {expected}, got {type(value).__name__}")


def check_function(argument: str, value: object) -> None:
    """Check that an argument can be called."""
    if not callable(value):
        raise TypeError(f"{argument}: expected a function, got {type(value).__name__}")


def check_flag(argument: str, value: object) -> None:
    """Check that an argument is True or False, and nothing that merely counts as one of them."""
    if not isinstance(value, bool):
        raise TypeError(f"{argument}: expected True or False, got {type(value).__name__}")


MOST_NUMBER = 2.0**63
INTS, NUMBERS = (int, torch.SymInt), (int, float, torch.SymInt, torch.SymFloat)  # a trace has symbols for some


def check_int(argument: str, value: object, least: int = 1, expected: str | None = None) -> None:
    """Check that an argument is an int in [least, 2^31); True is none.

    Args:
        argument: its name.
        value: what came.
        least: the smallest that is served.
        expected: what a message says where the type is wrong or the value too small.
    """
    if not isinstance(value, INTS) or isinstance(value, bool) or value < least:
        check(False, argument, expected or ("a positive int" if least == 1 else f"an int >= {least}"), value)
    if value >= 2**31:
        check(False, argument, "less than 2^31", value)


def check_number(argument: str, value: object, least: int | None = None) -> None:
    """Check that an argument is a finite number, an int of 64 bits or a float, of at least `least`; True is none."""
    fits = isinstance(value, NUMBERS) and not isinstance(value, bool) and -MOST_NUMBER < value < MOST_NUMBER
    if not fits or (least is not None and value < least):
        check(False, argument, "a finite number" if least is None else f"a number >= {least}", value)


def check_device(argument: str, device: torch.device | str) -> torch.device:
    """Check that an argument names a device, and return it.

    Raises:
        TypeError: neither a device nor a str.
        ValueError: a str that names none.
    """
    check_type(argument, device, (torch.device, str), "a torch.device or its name")
    try:
        return torch.device(device)
    except RuntimeError:
        check(False, argument, "a torch.device or its name", repr(device))
        raise


def is_positive_int(value: object) -> bool:
    """An int above 0; True is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


FLOAT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INT_DTYPES = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of sums, scores and LSE: float64 for float64, float32 otherwise."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_tensor(
    argument: str,
    tensor: Tensor,
    shape: tuple[int | str, ...],
    dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES,
    device: torch.device | None = None,
) -> None:
    """Check layout, rank, sizes (an int is exact, a str is only a name), dtype and device. Reads no values.

    Raises:
        TypeError: not a tensor.
        ValueError: anything else; one line.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{argument}: expected a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "a nested one" if tensor.is_nested else f"layout {tensor.layout}"
        raise ValueError(f"{argument}: expected a strided tensor, got {kind}")
    fits = len(shape) == tensor.dim() and all(
        isinstance(want, str) or want == got for want, got in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{argument}: expected shape [{', '.join(map(str, shape))}], got {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{argument}: expected dtype {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{argument}: expected device {device}, got {tensor.device}")


def linear_output(argument: str, output: object) -> Tensor:
    """Return the product that a linear module returned: a tensor, or the first of `(product, bias)`.

    The linears of vLLM and Megatron return the pair. A bias in it was not added to the product.

    Raises:
        TypeError: the product is not a tensor.
        ValueError: a bias that is not None, or a tuple of another length.
    """
    if isinstance(output, tuple):
        check(len(output) == 2, argument, "a tensor or (product, bias)", f"a tuple of {len(output)}")
        output, bias = output
        check(bias is None, argument, "no bias", "a bias beside the product")
    if not isinstance(output, Tensor):
        raise TypeError(f"{argument}: expected a tensor or (product, bias), got {type(output).__name__}")
    return output


def check_readable(argument: str, tensor: Tensor) -> None:
    """Check that a tensor whose values are asked for has any."""
    check(not tensor.is_meta, argument, "a tensor with values", "one on device meta")


def check_not_negative(argument: str, lengths: Tensor) -> None:
    """Check the values of lengths on the CPU; the first request whose length is below 0 is named."""
    check_readable(argument, lengths)
    wrong = (lengths < 0).nonzero()
    if wrong.numel():
        request = int(wrong[0])
        check(False, argument, "lengths >= 0", f"{int(lengths[request])} at request {request}")


def lens_on_cpu(argument: str, lens: Sequence[SupportsIndex] | Tensor, count: int) -> Tensor:
    """Return lengths, a sequence of ints or a CPU tensor of any int dtype, as `count` int32 on the CPU.

    Raises:
        TypeError: not a sequence of ints (Python's or numpy's), nor a tensor.
        ValueError: a tensor of another shape, dtype or device; another number of lengths; one outside int32.
    """
    if isinstance(lens, Tensor):
        check_tensor(argument, lens, (count,), INT_DTYPES, torch.device("cpu"))
    else:
        if not isinstance(lens, Sequence) or isinstance(lens, str | bytes):
            raise TypeError(f"{argument}: expected a list of ints or a CPU tensor, got {type(lens).__name__}")
        for request, length in enumerate(lens):
            if isinstance(length, bool) or not hasattr(length, "__index__") or isinstance(length, Tensor):
                raise TypeError(f"{argument}: expected ints, got {type(length).__name__} at request {request}")
        lens = [operator.index(length) for length in lens]
        check(len(lens) == count, argument, f"{count} lengths, one for each row of block_table", len(lens))
        outside = next((length for length in lens if not -(2**63) <= length < 2**63), None)
        check(outside is None, argument, "lengths below 2^31", outside)
        lens = torch.tensor(lens, dtype=torch.int64, device="cpu")
    longest = int(lens.max()) if lens.numel() else 0
    check(longest < 2**31, argument, "lengths below 2^31", longest)
    check_not_negative(argument, lens)
    return lens.to(torch.int32)


def check_dtype(argument: str, dtype: torch.dtype) -> None:
    """Check that a dtype is one of the floating types that are served."""
    if not isinstance(dtype, torch.dtype) or dtype not in FLOAT_DTYPES:
        check(False, argument, f"one of {', '.join(map(str, FLOAT_DTYPES))}", dtype)


def check_offsets(argument: str, offsets: Tensor, total: int | None = None) -> None:
    """Check values of a prefix sum on the CPU: starts at 0, never falls, ends at `total` where given."""
    values = offsets.tolist()
    check(len(values) > 0 and values[0] == 0, argument, "a first element of 0", values[0] if values else "no element")
    for request, (low, high) in enumerate(itertools.pairwise(values)):
        if high < low:
            check(False, argument, "values that never fall", f"{low} then {high} at request {request}")
    if total is not None:
        check(values[-1] == total, argument, f"a last element of {total}", values[-1])


def check_lengths(
    query_start_loc: Tensor, seq_lens: Tensor, names: tuple[str, str] = ("query_start_loc", "seq_lens")
) -> None:
    """Check the values of a batch on the CPU; 0 < S < Sq raises, S = 0 is a padding row."""
    check_offsets(names[0], query_start_loc)
    query_lens, lengths = query_start_loc.cpu().diff(), seq_lens.cpu()
    wrong = ((lengths < 0) | ((lengths != 0) & (lengths < query_lens))).nonzero()
    if wrong.numel():
        request = int(wrong[0])
        length, query_len = int(lengths[request]), int(query_lens[request])
        check(length >= 0, names[1], "lengths >= 0", f"{length} at request {request}")
        check(False, names[1], f"at least the query length {query_len}", f"{length} at request {request}")


def check_slots(slot_mapping: Tensor, num_slots: int, argument: str = "slot_mapping") -> None:
    """Check the values of a slot mapping on the CPU: -1 (padding) up to num_slots - 1."""
    if slot_mapping.numel():
        low, high = int(slot_mapping.min()), int(slot_mapping.max())
        check(low >= -1 and high < num_slots, argument, f"slots in [-1, {num_slots})",
              low if low < -1 else high)  # fmt: skip


def check_blocks(
    block_table: Tensor,
    num_tokens: Iterable[int],
    block_size: int,
    num_blocks: int,
    argument: str = "block_table",
) -> None:
    """Check by value (on the CPU) that the first `num_tokens[b]` tokens of each request lie in blocks of the cache."""
    width = block_table.shape[1]
    used = [-(-tokens // block_size) for tokens in num_tokens]
    for request, columns in enumerate(used):
        check(columns <= width, argument, f"at least {columns} columns for request {request}", width)
    owned = torch.arange(width, device="cpu") < torch.tensor(used, device="cpu")[:, None]
    block_table = block_table.cpu()
    wrong = owned & ((block_table < 0) | (block_table > num_blocks - 1))
    if wrong.any():
        request = int(wrong.any(1).nonzero()[0])
        block = int(block_table[request][wrong[request]][0])
        check(False, argument, f"blocks in [0, {num_blocks}) at request {request}", block)
