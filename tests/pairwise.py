"""Covering arrays: few rows that contain every pair of values of any two columns."""

import itertools
from random import Random


def cover(columns):
    """Return rows, with one value per column, that contain every pair of values of any two columns.

    The result is the smallest of a greedy search with the columns in this order and in 40 others. It is deterministic.
    """
    random, orders = Random(0), [list(columns)]
    orders += [random.sample(orders[0], len(columns)) for _ in range(40)]
    found = [(order, _greedy([len(columns[name]) for name in order])) for order in orders]
    order, rows = min(found, key=lambda found: len(found[1]))
    return [tuple(columns[name][row[order.index(name)]] for name in columns) for row in rows]


def _greedy(sizes):
    """Return rows as indices.

    Each row starts from a missing pair, and takes in every other column the value with the most missing pairs. The
    first value wins ties, so the result is deterministic.
    """
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(range(len(sizes)), 2)
        for x in range(sizes[a])
        for y in range(sizes[b])
    }
    rows = []
    while missing:
        row = dict(min(missing))
        for place, size in enumerate(sizes):
            if place not in row:
                row[place] = max(range(size), key=lambda v, p=place, r=row: (_gain(r, p, v, missing), -v))
        missing -= set(itertools.combinations(sorted(row.items()), 2))
        rows.append(row)
    return rows


def _gain(row, place, value, missing):
    return sum(tuple(sorted([item, (place, value)])) in missing for item in row.items())
