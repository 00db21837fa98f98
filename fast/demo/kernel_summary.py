"""Summary of the backends that serve the ops of a model, for the output of the main job."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .. import backends

REFERENCE_ALONE = ["reference: plain PyTorch and einops"]  # the lines of a job that `fast` does not serve


def summarize_kernels(lines: Iterable[str], attention: backends.KernelRequest) -> dict[str, list[str]]:
    """Return which backend serves each op of the package `fast`.

    Args:
        lines: lines of `fast.backends.explain` for all layers of the model.
        attention: request for the op that attends the cache in a decode.

    Returns:
        Two lists of lines. `lines` has one line for each op: its backend, and why the other backends do not serve it.
        If layers differ, an op may have several lines. `summary` has one line for each backend that has kernels for
        some of the ops: how many ops it serves, or the first reason why it cannot serve `attention`.
    """
    lines = list(dict.fromkeys(lines))
    chosen = re.findall(r"^(\w+): (\w+)", "\n".join(lines), re.MULTILINE)  # pairs of op and backend
    named = dict(chosen)
    summary = []
    for candidate in backends.registered():
        ops = list(dict.fromkeys(op for op, name in chosen if name == candidate.name))
        reasons = [why.removeprefix(f"{candidate.name}: ") for why in candidate.validate_configuration(attention)]
        if not ops and (candidate.library is not None or not candidate.ops.keys() & named.keys()):
            continue  # `python -m fast backends` lists the kernels of other libraries
        if ops:
            hidden = len(ops) in (1, len(named)) or attention.op not in ops
            shown = "" if hidden else f", {attention.op} among them"
            line = f"serves {len(ops)} of {len(named)} ops{shown if len(ops) > 1 else ': ' + ops[0]}"
        elif reasons:
            more = f" and {len(reasons) - 1} more reason{'s' * (len(reasons) > 2)}" if len(reasons) > 1 else ""
            line = f"serves none: {reasons[0]}{more}"
        else:
            line = "serves none: --backend names another backend, or other backends have a higher priority"
        summary.append(f"{candidate.name}: {line}")
    return {"lines": lines, "summary": summary}
