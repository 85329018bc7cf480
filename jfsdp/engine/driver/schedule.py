"""The order of a step as data: which unit's weights are on their way while which unit computes.

A step calls units in an order that its trace shows. `frontiers` says for each call up to which later call weights are
gathered by then; `steady` finds the iterations of a loop that all look alike, so that one scan can run them.
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
      forward: k: while a unit computes, the weights of the next k units are gathered or on their way; 0 gathers each
        unit when it is called. Or by unit, the units whose gathers start before it computes, in the order in which
        they are called; a unit that no list names is gathered when it is called. A stack of layers has one name, and
        follows itself: `{"layers": ["layers"]}`.
      backward: the same for the backward, which runs through the calls in reverse. Each of the two is 1 by default.

    Source: `set_modules_to_forward_prefetch` and `set_modules_to_backward_prefetch` of PyTorch FSDP2.
    """

    forward: Ahead = 1
    backward: Ahead = 1


def as_prefetch(value: int | Prefetch | None) -> Prefetch:
    """Read the `prefetch` argument of `train_step`; None is depth 1."""
    if isinstance(value, Prefetch):
        return value
    return Prefetch() if value is None else Prefetch(value, value)


def frontiers(order: Sequence[str], ahead: Ahead, direction: str) -> list[int]:
    """Return for each call up to which call weights are gathered, or on their way, while it computes.

    Args:
      order: the names of the units in the order of their calls.
      direction: "forward" or "backward", for messages.

    Raises:
      ValueError: for a depth that no step can have, a name that is no unit of the order, or a list that is not what
        follows its unit.
    """
    if isinstance(ahead, int):
        if order and ahead > len(order):
            raise ValueError(
                f"prefetch {direction}={ahead}: a step gathers {len(order)} units {direction}; ask for no more"
            )
    else:
        return _by_lists(order, ahead, direction)
    return [min(place + ahead, len(order) - 1) for place in range(len(order))]


def _by_lists(order: Sequence[str], ahead: Mapping[str, Sequence[str]], direction: str) -> list[int]:
    """Follow lists; each starts with the unit called next, or with the first that is not on its way yet."""
    known = list(dict.fromkeys(order))
    for unit, behind in ahead.items():
        for name in (unit, *behind):
            if name not in known:
                raise ValueError(
                    f"prefetch {direction}[{unit!r}]: {name!r} is no unit that the step gathers {direction}; these "
                    f"are, in their order: {_listed(known)}"
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
    for unit, behind in ahead.items():
        if longest[unit] < len(behind):
            place = order.index(unit)
            follows = order[place + 1 : place + 1 + len(behind)]
            reverse = " (the backward runs in reverse)" if direction == "backward" else ""
            raise ValueError(
                f"prefetch {direction}[{unit!r}]={list(behind)}: after {unit!r} the step calls {_listed(follows)}"
                f"{reverse}; gathers start in the order of the calls"
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
    """Return the longest run of iterations of a loop in which weights come and go alike.

    In these, every call leaves as many gathers on their way as it found, all of them for calls of the same loop.

    Args:
      reached: as `frontiers` gives it, for all calls of the step.
      start: the place of the loop's first call.
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
