"""Fewer cases of what repeats itself."""

import itertools

import pytest


def thin(cases, every=2):
    """Return cases of which one in `every` runs with the tests, from the first on; the proofs have the others."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*row, marks=[pytest.mark.proof] * bool(place % every)) for place, row in enumerate(rows)]


def each_value(rows, besides=()):
    """Return cases of which so few run with the tests that every value of a column is in one; the proofs have the rest.

    Greedy: the next has the most values that are in none yet, and otherwise such as are in few.

    Args:
      besides: the places of columns whose values need not all be in one, since other tests have them.
    """
    values = [[(at, repr(value)) for at, value in enumerate(row) if at not in besides] for row in rows]
    counts, chosen = dict.fromkeys(itertools.chain(*values), 0), set()
    while not all(counts.values()):
        chosen.add(best := min(range(len(rows)), key=lambda at: sorted(counts[value] for value in values[at])))
        counts |= {value: counts[value] + 1 for value in values[best]}
    return [pytest.param(*row, marks=[pytest.mark.proof] * (at not in chosen)) for at, row in enumerate(rows)]
