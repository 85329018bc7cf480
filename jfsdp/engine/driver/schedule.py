"""The order of a step as data: which gathers are in flight while a unit computes.

A step calls units in the order of its trace. For each call, `frontiers` returns the last call whose weights are
gathered or in flight; `steady` finds the iterations of a loop with the same pattern, so that one scan can run them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jfsdp.arguments import Size, checked

Ahead = Size | Mapping[str, Sequence[str]]


@checked
@dataclasses.dataclass(frozen=True)
class Prefetch:
    """How far gathers run ahead of the compute, forward and backward.

    Attributes:
      forward: k: while a unit computes, the weights of the next k units are gathered or in flight; 0 gathers each unit
        when it is called. Or a dict: for each unit, the units whose gathers start before it computes, in the order of
        their calls; a unit in no list is gathered when it is called. A stack of layers has one name, and follows
        itself: `{"layers": ["layers"]}`.
      backward: the same for the backward, which runs through the calls in reverse. The default of both is 1.

    Source: `set_modules_to_forward_prefetch` and `set_modules_to_backward_prefetch` of PyTorch FSDP2.
    """

    forward: Ahead = 1
    backward: Ahead = 1


def as_prefetch(value: int | Prefetch | None) -> Prefetch:
    """Convert the `prefetch` argument of `train_step`; None is depth 1."""
    if isinstance(value, Prefetch):
        return value
    return Prefetch() if value is None else Prefetch(value, value)


def frontiers(order: Sequence[str], ahead: Ahead, direction: str) -> list[int]:
    """Return for each call the last call whose weights are gathered or in flight while it computes.

    Args:
      order: the names of the units in the order of their calls.
      direction: "forward" or "backward", for messages.

    Raises:
      ValueError: for a depth beyond the number of calls, a name that is not a unit of the order, or a list that does
        not match the calls after its unit.
    """
    if isinstance(ahead, int):
        if order and ahead > len(order):
            raise ValueError(
                f"prefetch {direction}={ahead}: a step gathers {len(order)} units {direction}; set a depth of at most "
                f"{len(order)}"
            )
    else:
        return _by_lists(order, ahead, direction)
    return [min(place + ahead, len(order) - 1) for place in range(len(order))]


def _by_lists(order: Sequence[str], ahead: Mapping[str, Sequence[str]], direction: str) -> list[int]:
    """Apply lists; each starts with the unit called next, or with the first unit whose gather has not started."""
    known = list(dict.fromkeys(order))
    for unit, following in ahead.items():
        for name in (unit, *following):
            if name not in known:
                raise ValueError(
                    f"prefetch {direction}[{unit!r}]: {name!r} is not a unit that the step gathers {direction}; these "
                    f"units are, in order: {_listed(known)}"
                )
    reached, last, longest = [], -1, dict.fromkeys(ahead, 0)
    for place, unit in enumerate(order):
        wanted, last = ahead.get(unit, ()), max(last, place)
        found = {start: _num_matching(order[start + 1 :], wanted) for start in (place, last)}
        start = max(found, key=lambda start: (found[start], start))
        last = max(last, start + found[start])
        if unit in longest:
            longest[unit] = max(longest[unit], found[start])
        reached.append(last)
    for unit, following in ahead.items():
        if longest[unit] < len(following):
            place = order.index(unit)
            follows = order[place + 1 : place + 1 + len(following)]
            reverse = " (the backward runs in reverse)" if direction == "backward" else ""
            raise ValueError(
                f"prefetch {direction}[{unit!r}]={list(following)}: after {unit!r} the step calls {_listed(follows)}"
                f"{reverse}; list the units in the order of their calls"
            )
    return reached


def _num_matching(order: Sequence[str], wanted: Sequence[str]) -> int:
    count = 0
    while count < min(len(order), len(wanted)) and order[count] == wanted[count]:
        count += 1
    return count


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:8])) or "nothing"
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"


def steady(reached: Sequence[int], start: int, num_calls: int, length: int) -> tuple[int, int]:
    """Return the longest range of iterations of a loop with the same pattern of gathers.

    In these, every call leaves as many gathers in flight as it found, all of them for calls of the same loop.

    Args:
      reached: the result of `frontiers` for all calls of the step.
      start: the index of the loop's first call.
      num_calls: calls in one iteration.
      length: iterations.
    """
    if num_calls == 0:
        return 0, length

    def shape(iteration: int) -> tuple[int, ...] | None:
        first = start + iteration * num_calls
        found = max(reached[first - 1] - first + 1, 0) if first else 0
        ahead = [reached[first + place] - (first + place) for place in range(num_calls)]
        stays = found == ahead[-1] and reached[first + num_calls - 1] < start + num_calls * length
        return (found, *ahead) if stays else None

    best, begin = (0, 0), 0
    for iteration in range(length):
        if shape(iteration) is None or shape(iteration) != shape(begin):
            begin = iteration
        if shape(iteration) is not None and iteration + 1 - begin > best[1] - best[0]:
            best = (begin, iteration + 1)
    return best
