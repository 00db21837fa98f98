"""Backends that the environment names, by one variable for the prefills and one for the decodes of a family.

The variables are MLA_PREFILL_BACKEND, MLA_DECODE_BACKEND, GQA_PREFILL_BACKEND and GQA_DECODE_BACKEND. The constructors
of `MLAAttention`, `GQAAttention` and their builders read the variables once; `warmup`, `explain` and the commands
`python -m fast` and `python -m fast backends` read them in each call. A variable binds its ops to the backend that it
names, except ops that the argument `backend=` of the constructor binds. An empty variable counts as not set. Functions
that are called directly, such as `mla_decode`, do not read the environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from reference.interfaces import UnsupportedConfiguration

from .own import DECODES
from .selection import STEP_PARTS, BackendChoice, BoundOps, all_ops, bind, named

VARIABLES = {  # variable: its ops, or parts of a step (`STEP_PARTS`)
    "MLA_PREFILL_BACKEND": ("flash_attn_varlen",),
    "MLA_DECODE_BACKEND": DECODES,
    "GQA_PREFILL_BACKEND": ("gqa_prefill", "gqa_varlen_attention"),
    "GQA_DECODE_BACKEND": ("gqa_decode",),
}


def bind_with_environment(backend: BackendChoice, ops: Iterable[str] | None = None) -> BoundOps | None:
    """Turn `backend=` into a mapping as `bind` does, and add the ops that the environment binds.

    Args:
        backend: a name, a mapping from op to name, or None.
        ops: the ops that are called; None for all ops. A variable without an op among them is not read.

    Returns:
        A mapping that can be passed as `backend=` of each op. Its attribute `variables` maps each op or part that a
        variable has bound to the name of the variable. None if neither the argument nor the environment binds an op.

    Raises:
        ValueError: as `bind`, or a variable has an unknown name; the message names the variable.
        UnsupportedConfiguration: as `bind`, or the backend that a variable names declares none of the variable's ops.
    """
    bound = bind(backend, ops)
    called = set(all_ops() if ops is None else ops)
    found: dict[str, str] = {}
    for variable, variable_ops in VARIABLES.items():
        name = os.environ.get(variable, "")
        ops_of_parts = {each: STEP_PARTS.get(each, each) for each in variable_ops}
        if not name or called.isdisjoint(ops_of_parts.values()):
            continue
        declared = [each for each, op in ops_of_parts.items() if op in named(name, variable).ops]
        if not declared:
            raise UnsupportedConfiguration(
                [f"{variable}: {name} has no kernel for {op}" for op in ops_of_parts.values()]
            )
        taken = {each for each, op in ops_of_parts.items() if bound is not None and (each in bound or op in bound)}
        if variable_ops == DECODES and taken:  # the ops of one decode stay together
            continue
        found |= dict.fromkeys((each for each in declared if each not in taken), variable)
    if not found:
        return bound
    merged = BoundOps({**(bound or {}), **{each: os.environ[variable] for each, variable in found.items()}})
    merged.variables = {**({} if bound is None else bound.variables), **found}
    return merged
