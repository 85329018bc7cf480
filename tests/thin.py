"""Selection of the cases of a parametrized test that are not marked `proof`."""

import itertools

import pytest


def thin(cases, every=2):
    """Return cases of which one in `every`, from the first on, runs with the tests; the others are marked `proof`."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*row, marks=[pytest.mark.proof] * bool(place % every)) for place, row in enumerate(rows)]


def each_value(rows, besides=()):
    """Return cases of which few run with the tests, so that each value of a column occurs; the others are `proof`.

    Greedy: the next case is the one whose values occur least in the cases selected so far.

    Args:
      besides: indices of columns whose values need not all occur, because other tests have them.
    """
    values = [[(at, repr(value)) for at, value in enumerate(row) if at not in besides] for row in rows]
    counts, chosen = dict.fromkeys(itertools.chain(*values), 0), set()
    while not all(counts.values()):
        chosen.add(best := min(range(len(rows)), key=lambda at: sorted(counts[value] for value in values[at])))
        counts |= {value: counts[value] + 1 for value in values[best]}
    return [pytest.param(*row, marks=[pytest.mark.proof] * (at not in chosen)) for at, row in enumerate(rows)]
