"""Covering arrays: few rows in which every pair of values of two columns stands."""

import itertools
from random import Random


def cover(columns):
    """Return rows, one value of each column, such that every pair of values of two columns stands in some row.

    The fewest rows that a greedy search finds with the columns in this order and in 40 others, always the same ones.
    """
    random, orders = Random(0), [list(columns)]
    orders += [random.sample(orders[0], len(columns)) for _ in range(40)]
    found = [(order, _greedy([len(columns[name]) for name in order])) for order in orders]
    order, rows = min(found, key=lambda found: len(found[1]))
    return [tuple(columns[name][row[order.index(name)]] for name in columns) for row in rows]


def _greedy(sizes):
    """Return rows as indices: each starts from a pair that is still missing, and takes for every other column the value
    that meets most missing pairs. The order of the values decides ties, so the rows are the same everywhere."""
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
