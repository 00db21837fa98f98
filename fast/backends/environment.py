"""Backends that the environment names: the variables MLA_PREFILL_BACKEND and MLA_DECODE_BACKEND.

The constructors of `MLAAttention` and `MLAMetadataBuilder` read the variables once; `warmup`, `explain` and the
commands `python -m fast` and `python -m fast backends` read them in each call. A variable binds its ops to the
backend that it names, except ops that the argument `backend=` of the constructor binds. An empty variable counts as
not set. Functions that are called directly, such as `mla_decode`, do not read the environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from reference.interfaces import UnsupportedConfiguration

from .own import DECODES
from .selection import BackendChoice, BoundOps, all_ops, bind, named

VARIABLES = {"MLA_PREFILL_BACKEND": ("flash_attn_varlen",), "MLA_DECODE_BACKEND": DECODES}  # variable: its ops


def bind_with_environment(backend: BackendChoice, ops: Iterable[str] | None = None) -> BoundOps | None:
    """Turn `backend=` into a mapping as `bind` does, and add the ops that the environment binds.

    Args:
        backend: a name, a mapping from op to name, or None.
        ops: the ops that are called; None for all ops. A variable without an op among them is not read.

    Returns:
        A mapping that can be passed as `backend=` of each op. Its attribute `variables` maps each op that a variable
        has bound to the name of the variable. None if neither the argument nor the environment binds an op.

    Raises:
        ValueError: as `bind`, or a variable has an unknown name; the message names the variable.
        UnsupportedConfiguration: as `bind`, or the backend that a variable names declares none of the variable's ops.
    """
    bound = bind(backend, ops)
    called = set(all_ops() if ops is None else ops)
    found: dict[str, str] = {}
    for variable, variable_ops in VARIABLES.items():
        name = os.environ.get(variable, "")
        if not name or called.isdisjoint(variable_ops):
            continue
        declared = [op for op in variable_ops if op in named(name, variable).ops]
        if not declared:
            raise UnsupportedConfiguration([f"{variable}: {name} has no kernel for {op}" for op in variable_ops])
        if bound is None or not any(op in bound for op in variable_ops):  # ops of one decode stay together
            found |= dict.fromkeys(declared, variable)
    if not found:
        return bound
    merged = BoundOps({**(bound or {}), **{op: os.environ[variable] for op, variable in found.items()}})
    merged.variables = {**({} if bound is None else bound.variables), **found}
    return merged
