"""The attention families of the main job, and what depends on the family: `--family`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from reference.interfaces import check

from ..parity import Parity
from . import mla_figures
from .gqa import figures as gqa_figures
from .gqa.job import GQAJob
from .job import ASSETS, Job


@dataclass(frozen=True)
class Family:
    """What the main job does differently for an attention family.

    Attributes:
        job_type: class of the job: how the model is patched and served.
        compile_ahead: function that compiles the kernels of `fast` for the model on a GPU; None if a prompt that is
            served before each measurement compiles all of them.
        compare_ops: function that compares the packages op by op on a batch of so many tokens.
        cache_figures: function that returns the bytes of a cache for 1000 tokens.
        kernels: function that returns which backend serves which op.
        refused: names of the options that other families have.
    """

    job_type: type[Job]
    compile_ahead: Callable[[Job, Console], None] | None
    compare_ops: Callable[[Job, int], list[Parity]]
    cache_figures: Callable[[Job], dict[str, Any]]
    kernels: Callable[[Job], dict[str, list[str]]]
    refused: tuple[str, ...] = ()


FAMILIES = {
    "mla": Family(
        Job,
        mla_figures.compile_ahead,
        mla_figures.compare_ops,
        mla_figures.cache_figures,
        mla_figures.kernels,
    ),
    "gqa": Family(
        GQAJob,
        None,
        gqa_figures.compare_ops,
        gqa_figures.cache_figures,
        gqa_figures.kernels,
        refused=("context_parallel", "interleave", "merge", "workspace_tokens"),
    ),
}
DEFAULTS = {"workspace_tokens": 256}  # of options whose default is None until the family is known


def default_model(family: str) -> str:
    """Return the folder of the checkpoint that is served without `--model`."""
    return str(ASSETS / FAMILIES[family].job_type.MODEL)


def read_family(args: argparse.Namespace) -> Family:
    """Return the family that the options name, and set the options that have another default for each family.

    Args:
        args: options; `model` and each option of `DEFAULTS` is None if it was not given.

    Raises:
        ValueError: an option that the family does not have was given.
    """
    family = FAMILIES[args.family]
    for name in family.refused:
        others = " or ".join(other for other, each in FAMILIES.items() if name not in each.refused)
        option = f"--{name.replace('_', '-')}"
        check(getattr(args, name) is None, option, f"--family {others}", f"--family {args.family}")
    if args.model is None:
        args.model = default_model(args.family)
    for name, value in DEFAULTS.items():
        if name not in family.refused and getattr(args, name) is None:
            setattr(args, name, value)
    return family
