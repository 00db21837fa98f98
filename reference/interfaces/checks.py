"""Checks of a single value or tensor. Every error message is one line: "argument: expected ..., got ..."."""

from __future__ import annotations

import itertools
import numbers
import operator
from collections.abc import Iterable, Sequence
from typing import SupportsIndex

import torch
from torch import Tensor, nn


def check(condition: bool, argument: str, expected: object, got: object) -> None:
    """Raise ValueError("argument: expected ..., got ...") if a condition is False.

    Args:
        condition: whether the argument is valid.
        argument: name of the argument.
        expected: description of valid values.
        got: the value that was passed, or a description of it.
    """
    if not condition:
        raise ValueError(f"{argument}: expected {expected}, got {_in_one_line(got)}")


def _in_one_line(got: object) -> str:
    """Return a value as text in one line for an error message.

    The lines of a str are joined. For a tensor, and for any other value whose text is long or has several lines, the
    result is the name of its type.
    """
    if isinstance(got, Tensor):
        return type(got).__name__
    text = str(got)
    if isinstance(got, str):
        return " ".join(text.splitlines())
    return text if len(text) <= 500 and "\n" not in text else type(got).__name__


def short_text(value: object) -> str:
    """Return `repr(value)` in one line; replace everything after 60 characters by "..."."""
    text = " ".join(repr(value).splitlines())
    return text if len(text) <= 60 else f"{text[:60]}..."


def check_type(argument: str, value: object, kind: type | tuple[type, ...], expected: str | None = None) -> None:
    """Check that an argument is an instance of a class.

    Args:
        argument: name of the argument.
        value: the argument.
        kind: class, or tuple of classes.
        expected: description of `kind` for the message; None means the names of the classes.

    Raises:
        TypeError: the argument has another class.
    """
    if not isinstance(value, kind):
        if expected is None:
            name = kind.__name__ if isinstance(kind, type) else " or ".join(one.__name__ for one in kind)
            expected = f"{'an' if name.startswith(('A', 'O', 'MLA')) else 'a'} {name}"
        raise TypeError(f"{argument}: expected {expected}, got {type(value).__name__}")


def check_function(argument: str, value: object) -> None:
    """Check that an argument is callable."""
    if not callable(value):
        raise TypeError(f"{argument}: expected a function, got {type(value).__name__}")


def check_flag(argument: str, value: object) -> None:
    """Check that an argument is the bool True or False, and not another type such as int."""
    if not isinstance(value, bool):
        raise TypeError(f"{argument}: expected True or False, got {type(value).__name__}")


MOST_NUMBER = 2.0**63
# under torch.compile, an int or float may be a SymInt or SymFloat
INTS, NUMBERS = (int, torch.SymInt), (int, float, torch.SymInt, torch.SymFloat)


def check_int(argument: str, value: object, least: int = 1, expected: str | None = None, below: int = 2**31) -> None:
    """Check that an argument is an int in [least, below). A bool is not accepted.

    Args:
        argument: name of the argument.
        value: the argument.
        least: smallest valid value.
        expected: description of valid values for the message if the type is wrong or the value is too small; None means
            a description that is made from `least`.
        below: upper bound of the argument (exclusive), a power of 2.
    """
    if not isinstance(value, INTS) or isinstance(value, bool) or value < least:
        wanted = expected or ("a positive int" if least == 1 else f"an int >= {least}")
        check(False, argument, wanted, _with_type(value))
    if value >= below:
        check(False, argument, f"less than 2^{below.bit_length() - 1}", value)


def check_number(argument: str, value: object, least: int | None = None) -> None:
    """Check that an argument is an int or float, finite, below 2^63 and at least `least`. A bool is not accepted."""
    fits = isinstance(value, NUMBERS) and not isinstance(value, bool) and -MOST_NUMBER < value < MOST_NUMBER
    if not fits or (least is not None and value < least):
        check(False, argument, "a finite number" if least is None else f"a number >= {least}", _with_type(value))


def _with_type(value: object) -> object:
    """Return a value for a message; name the type of a number that is neither an int nor a float, such as numpy's."""
    other = isinstance(value, numbers.Number) and not isinstance(value, NUMBERS)
    return f"{value} of type {type(value).__name__}" if other else value


def check_device(argument: str, device: torch.device | str) -> torch.device:
    """Return the `torch.device` for an argument that is a device or the name of a device.

    Raises:
        TypeError: the argument is neither a device nor a str.
        ValueError: the str is not the name of a device.
    """
    check_type(argument, device, (torch.device, str), "a torch.device or its name")
    try:
        return torch.device(device)
    except RuntimeError:
        check(False, argument, "a torch.device or its name", repr(device))
        raise


def is_positive_int(value: object) -> bool:
    """Return whether a value is an int above 0. A bool is not accepted."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def is_positive_number(value: object) -> bool:
    """Return whether a value is an int or float above 0 and below 2^63. A bool and NaN are not accepted."""
    return isinstance(value, NUMBERS) and not isinstance(value, bool) and 0 < value < MOST_NUMBER


FLOAT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INT_DTYPES = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums, scores and LSE are computed: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_tensor(
    argument: str,
    tensor: Tensor,
    shape: tuple[int | str, ...],
    dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES,
    device: torch.device | None = None,
) -> None:
    """Check the layout, shape, dtype and device of a tensor, but not its values.

    Args:
        argument: name of the argument.
        tensor: the argument.
        shape: expected shape. An int must equal the size of the dimension; a str is a name for any size.
        dtypes: valid dtypes.
        device: expected device; None accepts any device.

    Raises:
        TypeError: the argument is not a tensor.
        ValueError: the layout, shape, dtype or device is wrong.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{argument}: expected a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "a nested one" if tensor.is_nested else f"layout {tensor.layout}"
        raise ValueError(f"{argument}: expected a strided tensor, got {kind}")
    fits = len(shape) == tensor.dim()
    if fits:
        for want, got in zip(shape, tensor.shape, strict=True):
            if not isinstance(want, str) and want != got:
                fits = False
    if not fits:
        raise ValueError(f"{argument}: expected shape [{', '.join(map(str, shape))}], got {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{argument}: expected dtype {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{argument}: expected device {device}, got {tensor.device}")


def check_scale_values(argument: str, scale: Tensor | None) -> None:
    """Check that every number of a scale on the CPU is finite and above 0. A scale on a GPU is not read; None is legal.

    While `torch.compile` traces the caller, the function checks nothing, because a traced tensor has no values. A
    kernel launch that is not traced checks its scales when the compiled code runs.

    Raises:
        ValueError: a number is 0, negative, NaN or infinite.
    """
    if scale is None or scale.device.type != "cpu" or torch.compiler.is_compiling():
        return
    if scale.dim() == 0:  # the usual case, and the faster one
        value = float(scale)
        check(0 < value < float("inf"), argument, "a finite number above 0", value)
        return
    wrong = scale.reshape(-1)[~((scale > 0) & scale.isfinite()).reshape(-1)]
    if wrong.numel():
        check(False, argument, "a finite number above 0", float(wrong[0]))


def check_out(
    argument: str,
    out: Tensor,
    shape: tuple[int | str, ...],
    dtype: torch.dtype,
    device: torch.device,
    *inputs: Tensor,
    contiguous: bool = False,
) -> None:
    """Check a tensor that the caller passes and that a function (op) writes.

    Args:
        argument: name of the argument.
        out: the tensor.
        shape: expected shape.
        dtype: expected dtype.
        device: expected device.
        inputs: tensors that the op reads. The memory of `out`, from its first to its last element, must not overlap
            these tensors. The overlap is not checked under torch.compile, where tensors have no addresses.
        contiguous: whether `out` must be contiguous.

    Raises:
        TypeError: the argument is not a tensor.
        ValueError: the layout, shape, dtype or device is wrong; two elements of `out` have the same address; `out`
            overlaps an input; `out` is not contiguous although it must be.
    """
    check_tensor(argument, out, shape, (dtype,), device)
    if not out.is_contiguous():
        strides = f"strides {list(out.stride())}"
        check(not contiguous, argument, "a contiguous tensor", strides)
        reach = 0
        for stride, size in sorted(zip(out.stride(), out.shape, strict=True)):
            check(stride > reach or size == 1, argument, "a tensor whose elements have different addresses", strides)
            reach += stride * (size - 1)
    if torch.compiler.is_compiling() or out.numel() == 0:
        return
    first, end = _addresses(out)
    for tensor in inputs:
        if tensor.numel() > 0 and tensor.device == out.device:
            low, high = _addresses(tensor)
            check(high <= first or end <= low, argument, "memory that no input has", "a tensor that overlaps an input")


def _addresses(tensor: Tensor) -> tuple[int, int]:
    """Return the address of the first element of a tensor, and the address after its last element."""
    reach = tensor.numel() - 1
    if not tensor.is_contiguous():
        reach = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def is_plain_linear(linear: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether a module is a `torch.nn.Linear` whose weight can be used directly.

    The class of the module must be exactly `nn.Linear`, and its weight a parameter of `dtype`. The module must have no
    hooks and no replaced `forward`. Otherwise the output of the module could differ from the product with its `weight`.
    """
    check_type("linear", linear, nn.Module, "a module")
    check_type("dtype", dtype, torch.dtype)
    if type(linear) is not nn.Linear or type(linear.weight) is not nn.Parameter or linear.weight.dtype != dtype:
        return False
    return not (linear._forward_hooks or linear._forward_pre_hooks or "forward" in linear.__dict__)


def linear_output(argument: str, output: object) -> Tensor:
    """Return the product from the output of a linear module, which is a tensor or a pair (product, bias).

    The linear modules of vLLM and Megatron return such a pair. The product does not include the bias, and this
    function does not add it, so the bias must be None.

    Raises:
        TypeError: the product is not a tensor.
        ValueError: the bias is not None, or the output is a tuple whose length is not 2.
    """
    if isinstance(output, tuple):
        check(len(output) == 2, argument, "a tensor or (product, bias)", f"a tuple of {len(output)}")
        output, bias = output
        check(bias is None, argument, "no bias", "a bias beside the product")
    if not isinstance(output, Tensor):
        raise TypeError(f"{argument}: expected a tensor or (product, bias), got {type(output).__name__}")
    return output


def check_readable(argument: str, tensor: Tensor) -> None:
    """Check that a tensor has values: it must not be on the device "meta"."""
    check(not tensor.is_meta, argument, "a tensor with values", "a tensor on device meta")


def check_not_negative(argument: str, lengths: Tensor) -> None:
    """Check that no length is negative; the message names the first request with a negative length."""
    check_readable(argument, lengths)
    wrong = (lengths < 0).nonzero()
    if wrong.numel():
        request = int(wrong[0])
        check(False, argument, "lengths >= 0", f"{int(lengths[request])} at request {request}")


def lens_on_cpu(argument: str, lens: Sequence[SupportsIndex] | Tensor, count: int) -> Tensor:
    """Return lengths as an int32 tensor [count] on the CPU.

    Args:
        argument: name of the argument.
        lens: sequence of ints (of Python or numpy), or a CPU tensor of any int dtype.
        count: expected number of lengths.

    Raises:
        TypeError: `lens` is neither a sequence of ints nor a tensor.
        ValueError: the tensor has a wrong shape, dtype or device; the number of lengths is wrong; a length is negative
            or does not fit into int32.
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
    """Check that a dtype is one of `FLOAT_DTYPES`."""
    if not isinstance(dtype, torch.dtype) or dtype not in FLOAT_DTYPES:
        check(False, argument, f"one of {', '.join(map(str, FLOAT_DTYPES))}", dtype)


def check_offsets(argument: str, offsets: Tensor, total: int | None = None, most: int | None = None) -> None:
    """Check the values of a prefix sum: it starts at 0 and never decreases.

    If `total` is given, the last element must be `total`. If `most` is given, the last element must be at most `most`.
    """
    values = offsets.tolist()
    check(len(values) > 0 and values[0] == 0, argument, "a first element of 0", values[0] if values else "no element")
    for request, (low, high) in enumerate(itertools.pairwise(values)):
        if high < low:
            check(False, argument, "values that never decrease", f"{low} then {high} at request {request}")
    if total is not None:
        check(values[-1] == total, argument, f"a last element of {total}", values[-1])
    if most is not None:
        check(values[-1] <= most, argument, f"a last element of at most {most}", values[-1])


def check_longest(argument: str, longest: int, offsets: Tensor) -> None:
    """Check the values of a prefix sum against an upper bound of the lengths: no length is larger than `longest`."""
    values = offsets.tolist()
    most = max((high - low for low, high in itertools.pairwise(values)), default=0)
    check(longest >= most, argument, f"at least {most}, the length of the longest request", longest)


def check_eager_offsets(argument: str, offsets: Tensor, total: int) -> None:
    """Check that a prefix sum on the CPU ends at `total`; do nothing on other devices and under torch.compile.

    Callers need this check before an op that does not raise if the last element is smaller than `total`.
    """
    if offsets.is_cpu and not torch.compiler.is_compiling():
        check_offsets(argument, offsets, total)


def check_lengths(
    query_start_loc: Tensor, seq_lens: Tensor, names: tuple[str, str] = ("query_start_loc", "seq_lens")
) -> None:
    """Check the values of the offsets and sequence lengths of a batch.

    Args:
        query_start_loc: [B + 1], prefix sum of the query lengths Sq.
        seq_lens: [B], sequence lengths S. S = 0 marks a padding row.
        names: names of the two arguments in messages.

    Raises:
        ValueError: the offsets decrease; a length is negative; a request has 0 < S < Sq.
    """
    check_offsets(names[0], query_start_loc)
    query_lens, lengths = query_start_loc.cpu().diff(), seq_lens.cpu()
    wrong = ((lengths < 0) | ((lengths != 0) & (lengths < query_lens))).nonzero()
    if wrong.numel():
        request = int(wrong[0])
        length, query_len = int(lengths[request]), int(query_lens[request])
        check(length >= 0, names[1], "lengths >= 0", f"{length} at request {request}")
        check(False, names[1], f"at least the query length {query_len}", f"{length} at request {request}")


def check_slots(slot_mapping: Tensor, num_slots: int, argument: str = "slot_mapping") -> None:
    """Check the values of a slot mapping: each value is -1 (the token is not written) or a slot in [0, num_slots)."""
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
    first_tokens: Tensor | None = None,
) -> None:
    """Check that the block table has valid blocks for all tokens of each request.

    Args:
        block_table: [B, W].
        num_tokens: B numbers; the first `num_tokens[b]` tokens of request b must be in blocks of the cache.
        block_size: tokens per block.
        num_blocks: blocks of the cache; block ids must be in [0, num_blocks).
        argument: name of the block table in messages.
        first_tokens: [B] on the CPU; blocks wholly before this token of a request are not checked. None means 0.

    Raises:
        ValueError: the table has too few columns for a request, or a block id is out of range.
    """
    width = block_table.shape[1]
    used = [-(-tokens // block_size) for tokens in num_tokens]
    for request, columns in enumerate(used):
        check(columns <= width, argument, f"at least {columns} columns for request {request}", width)
    owned = torch.arange(width, device="cpu") < torch.tensor(used, device="cpu")[:, None]
    if first_tokens is not None:
        owned &= torch.arange(width, device="cpu") >= (first_tokens // block_size)[:, None]
    block_table = block_table.cpu()
    wrong = owned & ((block_table < 0) | (block_table > num_blocks - 1))
    if wrong.any():
        request = int(wrong.any(1).nonzero()[0])
        block = int(block_table[request][wrong[request]][0])
        check(False, argument, f"blocks in [0, {num_blocks}) at request {request}", block)
