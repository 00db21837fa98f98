"""Trace the kernels of a step, and add up their times for each part of the step, such as "attention".

torch.profiler makes the traces. A trace has the start and the end of every kernel, memory copy and memory fill on the
GPU. The profiler gets these times from CUPTI, NVIDIA's profiling library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

PARTS = ("plan", "projections", "attention", "movement")
OTHER = "other"  # part of the kernels whose names contain no text of NAMES
NAMES = {  # part of a step: texts; a kernel belongs to the first part with a text that the kernel's name contains
    "plan": ("_plan_", "_visible_lens_kernel", "_advance_step_kernel"),
    "attention": ("_flash_attn_varlen", "_varlen_kernel", "_row_blocks_", "_two_phases", "_clear_kernel", "_combine_",
                  "decode_kernel", "_gqa_"),
    "projections": ("gemm", "gemv", "cutlass", "nvjet", "cublas", "splitK", "xmma", "layer_norm", "rms_norm", "RMSNorm",
                    "dot_kernel", "_multiply_heads_kernel"),
    "movement": (
        "_write_kernel", "_gather_kernel", "_copy_blocks", "_rope_", "_merge_", "_reorg_", "_sort_by_owner",
        "_zero_padding_kernel", "_write_quantized_kernel", "_gather_dequantized_kernel", "_quantize_kernel",
        "_dequantize_kernel", "_join_columns", "_convert_state", "Memcpy", "Memset", "elementwise", "CatArray", "copy",
        "fill",
    ),
}  # fmt: skip
STEP_MARK, LAYER_MARK = "atanh_kernel", "asinh_kernel"  # names of two kernels that no layer launches, used as marks


@dataclass(frozen=True)
class Kernel:
    """One kernel, copy or fill of a trace; times are in microseconds."""

    name: str
    start: float
    end: float


def part_of(name: str) -> str:
    """Return the part of a step to which a kernel belongs, or OTHER."""
    return next((part for part, texts in NAMES.items() if any(text in name for text in texts)), OTHER)


def own_times(kernels: Iterable[Kernel]) -> list[tuple[Kernel, float]]:
    """Return each kernel with its own time in microseconds, in the order of the starts.

    If two kernels overlap, the time of the overlap counts only for the kernel that started first. So the own times add
    up to the time in which at least one kernel runs.
    """
    found, end = [], float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: (kernel.start, kernel.end)):
        found.append((kernel, max(0.0, kernel.end - max(kernel.start, end))))
        end = max(end, kernel.end)
    return found


def busy_time(kernels: Iterable[Kernel]) -> float:
    """Return the time in microseconds in which at least one kernel runs."""
    return sum(time for _, time in own_times(kernels))


def time_of_parts(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Add up the own times of the kernels of each part of a step; return the sums in microseconds."""
    parts = dict.fromkeys((*PARTS, OTHER), 0.0)
    for kernel, time in own_times(kernels):
        parts[part_of(kernel.name)] += time
    if parts[OTHER] == 0.0:
        del parts[OTHER]
    return parts


def cut_at_marks(kernels: Sequence[Kernel], mark: str) -> list[list[Kernel]]:
    """Divide the kernels at each mark; the marks and the kernels before the first mark are left out."""
    steps: list[list[Kernel]] = []
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        if mark in kernel.name:
            steps.append([])
        elif steps:
            steps[-1].append(kernel)
    return steps


class Marker:
    """Launch kernels that mark the start of a step and the end of its first layer in a trace."""

    def __init__(self) -> None:
        self._one = torch.zeros(1, device="cuda")

    def step(self) -> None:
        """Mark the start of a step."""
        self._one.atanh_()

    def layer(self) -> None:
        """Mark the end of the first layer."""
        self._one.asinh_()


def traced_steps(step: Callable[[], object], repeats: int, marker: Marker) -> list[list[Kernel]]:
    """Trace `repeats` steps and return the kernels of each step; a step starts when the GPU is idle."""
    from torch.profiler import ProfilerActivity, profile

    def run() -> None:
        for _ in range(repeats):
            torch.cuda.synchronize()
            marker.step()
            step()
        torch.cuda.synchronize()

    with profile(activities=[ProfilerActivity.CUDA]):
        run()  # the first trace of a process also starts CUPTI
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
    kernels = [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    steps = cut_at_marks(kernels, STEP_MARK)
    if len(steps) != repeats:
        raise AssertionError(f"expected {repeats} steps in the trace, got {len(steps)}")
    return steps
