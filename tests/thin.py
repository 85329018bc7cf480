"""Fewer cases of what repeats itself."""

import pytest


def thin(cases, every=2):
    """Return cases of which one in `every` runs with the tests, from the first on; the proofs have the others."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*row, marks=[pytest.mark.proof] * bool(place % every)) for place, row in enumerate(rows)]
