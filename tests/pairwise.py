"""Covering arrays: few rows in which every pair of values of two columns stands."""

import itertools


def cover(columns):
    """Return rows, one value of each column, such that every pair of values of two columns stands in some row.

    Greedy: each row starts from a pair that is still missing, and takes for every other column the value that meets
    most missing pairs. The order of the values decides ties, so the rows are the same everywhere.
    """
    names = list(columns)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(range(len(names)), 2)
        for x in range(len(columns[names[a]]))
        for y in range(len(columns[names[b]]))
    }
    rows = []
    while missing:
        row = dict(min(missing))
        for place, name in enumerate(names):
            if place not in row:
                row[place] = max(range(len(columns[name])), key=lambda v, p=place, r=row: (_gain(r, p, v, missing), -v))
        missing -= set(itertools.combinations(sorted(row.items()), 2))
        rows.append(tuple(columns[name][row[place]] for place, name in enumerate(names)))
    return rows


def _gain(row, place, value, missing):
    return sum(tuple(sorted([item, (place, value)])) in missing for item in row.items())
