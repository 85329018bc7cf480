"""Selection of the cases of a parametrized test that are not marked `proof`."""

import itertools

import pytest


def thin(cases, every=2):
    """Mark all cases `proof` except one in `every`, from the first on."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*row, marks=[pytest.mark.proof] * bool(place % every)) for place, row in enumerate(rows)]


def each_value(rows, besides=()):
    """Mark all cases `proof` except a few that contain each value of every column.

    Greedy: the next exception is the one whose values occur least in the earlier ones.

    Args:
      besides: indices of columns whose values need not all occur, because other tests have them.
    """
    values = [[(at, repr(value)) for at, value in enumerate(row) if at not in besides] for row in rows]
    counts, chosen = dict.fromkeys(itertools.chain(*values), 0), set()
    while not all(counts.values()):
        chosen.add(best := min(range(len(rows)), key=lambda at: sorted(counts[value] for value in values[at])))
        counts |= {value: counts[value] + 1 for value in values[best]}
    return [pytest.param(*row, marks=[pytest.mark.proof] * (at not in chosen)) for at, row in enumerate(rows)]
