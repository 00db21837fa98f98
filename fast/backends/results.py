"""Check what a backend of another project returns, and name the backend in the error."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reference.interfaces import E4M3, ScheduleCosts, check, check_int, check_tensor, check_type, wide_dtype

from . import registry
from .own import OWN_BACKENDS


def check_state(
    backend: str, op: str, state: Any, shape: tuple[int, ...], out_dtype: torch.dtype,
    device: torch.device, lse: bool = True, written: tuple[Tensor | None, Tensor | None] = (None, None),
) -> None:  # fmt: skip
    """Check the attention state that a backend returned; do nothing for the backends of this package.

    Args:
        backend: name of the backend.
        op: name of the op, for the error.
        state: what the backend returned; it should be a pair (output, LSE).
        shape: (T, N, Dv), the shape of the output.
        out_dtype: dtype of the output.
        device: device of the output.
        lse: whether the call needs the LSE.
        written: tensors of the output and the LSE into which the backend had to write; None for a new tensor.

    Raises:
        TypeError: the output or the LSE is not a tensor.
        ValueError: the result is not a pair; the output or the LSE has a wrong shape, dtype or device, or is not the
            tensor into which the backend had to write. The message names the backend.
    """
    if backend in OWN_BACKENDS:
        return
    wanted = wide_dtype(out_dtype)
    if (
        type(state) is tuple
        and len(state) == 2
        and _fits(state[0], shape, out_dtype, device, written[0])
        and (_fits(state[1], (shape[1], shape[0]), wanted, device, written[1]) if lse else state[1] is written[1])
    ):
        return
    name = f"the result of the backend {backend} for {op}"
    pair = isinstance(state, tuple) and len(state) == 2
    check(pair, name, "a pair (out, lse)", type(state).__name__)
    check_tensor(f"{name}: out", state[0], shape, (out_dtype,), device)
    if lse:
        check_tensor(f"{name}: lse", state[1], (shape[1], shape[0]), (wanted,), device)
    for part, made, given in zip(("out", "lse"), state, written, strict=True):
        if given is not None and made is not given:
            check(False, f"{name}: {part}", "the tensor into which the backend had to write", "another tensor")


def _fits(
    tensor: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, written: Tensor | None
) -> bool:
    """Return whether a tensor is right for certain; False only means that `check_state` must look at each property."""
    return (
        (tensor is written or written is None)
        and type(tensor) is Tensor
        and tensor.shape == shape
        and tensor.dtype is dtype
        and tensor.device == device
        and tensor.layout is torch.strided
        and not tensor.is_nested
    )


class Part(NamedTuple):
    """One tensor of the result of an op, and what it must be.

    Attributes:
        name: name of the tensor for the error; empty if the result is one tensor and no tuple.
        shape: its shape.
        dtype: its dtype.
        device: its device.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def like(cls, name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> Part:
        """Return a part with the shape and the device of a tensor, and with its dtype unless a dtype is given."""
        return cls(name, tuple(tensor.shape), tensor.dtype if dtype is None else dtype, tensor.device)


def _plan_decode(seq_lens, num_programs, *rest):
    return (Part("tile_ranges", (num_programs, 5), torch.int32, seq_lens.device),
            Part("split_offsets", (seq_lens.shape[0] + 1,), torch.int32, seq_lens.device))  # fmt: skip


def _compute_visible_lens(query_start_loc, seq_lens, num_tokens, *rest):
    return (Part("", (num_tokens,), torch.int32, seq_lens.device),)


def _merge_attn_states(prefix_out, prefix_lse, suffix_out, suffix_lse, *into):
    # with tensors to write into, the launcher returns nothing
    return () if into else (Part.like("out", prefix_out), Part.like("lse", prefix_lse))


def _apply_rope(positions, q_pe, k_pe, frequencies, magnitude, interleaved, *q_scale):
    return Part.like("q_pe", q_pe, E4M3 if q_scale else None), Part.like("k_pe", k_pe)


def _rope_norm_and_cache(
    positions, q_pe, kv_c, k_pe, kv_cache, slot_mapping, norm_weight, eps, frequencies, magnitude, interleaved,
    cache_format, kv_scale, *q_scale,
):  # fmt: skip
    return [Part.like("q_pe", q_pe, E4M3 if q_scale else None), Part.like("kv_c", kv_c), Part.like("k_pe", k_pe)]


def _weight_attn_out(out, lses, rank):
    size, heads, tokens = lses.shape
    return (Part("out", (size, tokens, heads // size, out.shape[2]), out.dtype, out.device),
            Part("lse", (heads // size, tokens), lses.dtype, lses.device))  # fmt: skip


# op: function of the launcher's arguments that returns the tensors of its result. The launchers of all other ops write
# into tensors that they get, or are checked by `check_state`.
_PARTS: dict[str, Callable[..., Sequence[Part]]] = {
    "plan_decode": _plan_decode,
    "compute_visible_lens": _compute_visible_lens,
    "merge_attn_states": _merge_attn_states,
    "apply_rope": _apply_rope,
    "rope_norm_and_cache": _rope_norm_and_cache,
    "weight_attn_out": _weight_attn_out,
}


def kernel(name: str, op: str) -> Callable:
    """Return the function that launches the op `op` of the backend `name`.

    The function of a backend of another project also checks what the launcher returns, except for the ops of attention,
    whose results `check_state` checks. The function raises TypeError or ValueError with the name of the backend.
    """
    launcher = registry._REGISTERED[name].ops[op].launcher
    if isinstance(launcher, str):
        launcher = registry.imported(launcher)
    if name in OWN_BACKENDS:
        return launcher
    if op in _PARTS:
        return functools.partial(_with_checked_parts, name, op, launcher)
    if op in ("decode_programs", "schedule_costs"):
        return functools.partial(_with_checked_value, name, op, launcher)
    return launcher


def _with_checked_parts(backend: str, op: str, launcher: Callable, *arguments: Any) -> Any:
    """Call a launcher and check the tensors that it returns."""
    result, parts = launcher(*arguments), _PARTS[op](*arguments)
    name = f"the result of the backend {backend} for {op}"
    if len(parts) > 1:
        right = isinstance(result, tuple) and len(result) == len(parts)
        names = ", ".join(part.name for part in parts)
        check(right, name, f"a tuple ({names})", type(result).__name__)
    for part, made in zip(parts, result if len(parts) > 1 else (result,), strict=False):
        if not _fits(made, part.shape, part.dtype, part.device, None):
            check_tensor(f"{name}: {part.name}" if part.name else name, made, part.shape, (part.dtype,), part.device)
    return result


def _with_checked_value(backend: str, op: str, launcher: Callable, *arguments: Any, **options: Any) -> Any:
    """Call a launcher of `decode_programs` or `schedule_costs`, and check what it returns."""
    result, name = launcher(*arguments, **options), f"the result of the backend {backend} for {op}"
    if op == "decode_programs":
        check_int(name, result, 0)
    else:
        check_type(name, result, ScheduleCosts)
    return result
