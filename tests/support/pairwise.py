"""Choose few cases of a test with many parameters, so that every pair of values of two parameters still occurs.

A test with parameters has one case for each combination of their values. Most faults depend on the value of one or two
parameters. A selection in which every pair of values occurs finds these faults, and has far fewer cases.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence


def pairwise(cases: Sequence[Mapping[str, Hashable]]) -> list[int]:
    """Return the indices of cases in which every pair of values occurs that occurs in all cases.

    The function takes, again and again, the first case with the most pairs that no earlier case has.

    Args:
        cases: for each case the values of its parameters by name. Cases with one or two parameters are all returned.
    """
    pairs = [set(itertools.combinations(sorted(case.items(), key=lambda item: item[0]), 2)) for case in cases]
    missing = set().union(*pairs)
    chosen = []
    for index, case in enumerate(cases):
        if len(case) < 2:
            chosen.append(index)
    left = [index for index in range(len(cases)) if len(cases[index]) >= 2]
    while missing:
        best = max(left, key=lambda index: (len(pairs[index] & missing), -index))
        chosen.append(best)
        left.remove(best)
        missing -= pairs[best]
    return sorted(chosen)
