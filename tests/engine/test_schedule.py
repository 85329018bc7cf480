"""When what is gathered: depths and lists of prefetch, and the iterations of a loop that look alike."""

import pytest

from jfsdp.engine.driver.schedule import Prefetch, as_prefetch, frontiers, steady
from tests.refusals import refuses, refusing

LIST = ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("ahead", "reached"),
    [
        (0, [0, 1, 2, 3]),
        (1, [1, 2, 3, 3]),
        (2, [2, 3, 3, 3]),
        (4, [3, 3, 3, 3]),
        ({}, [0, 1, 2, 3]),
        ({"b": ["c"]}, [0, 2, 2, 3]),
        ({"a": ["b", "c"]}, [2, 2, 2, 3]),
        ({"a": ["b", "c"], "c": ["d"]}, [2, 2, 3, 3]),
        ({"a": ["b", "c"], "b": ["d"]}, [2, 3, 3, 3]),  # c is on its way already
        ({"a": ["b", "c"], "b": ["c", "d"]}, [2, 3, 3, 3]),
    ],
)
def test_gathers_run_ahead_by_depth_or_by_list(ahead, reached):
    assert frontiers(LIST, ahead, "forward") == reached


def test_a_stack_follows_itself_and_its_last_layer_what_comes_after():
    order = ["layers"] * 4 + ["head"]
    assert frontiers(order, {"layers": ["layers"]}, "forward") == [1, 2, 3, 3, 4]
    assert frontiers(order, {"layers": ["layers", "head"]}, "forward") == [1, 2, 4, 4, 4]
    assert frontiers(order, {"layers": ["layers", "layers"]}, "forward") == [2, 3, 3, 3, 4]


@pytest.mark.parametrize(
    ("ahead", "facts"),
    [
        (5, ("forward=5", "4 units")),
        ({"x": ["b"]}, ("'x'", "'a', 'b', 'c', 'd'")),
        ({"a": ["x"]}, ("['a']", "'x'")),
        ({"a": ["c"]}, ("['a']=['c']", "after 'a'", "'b'")),
        ({"b": ["a"]}, ("['b']=['a']", "after 'b'", "'c'")),
        ({"a": ["b", "d"]}, ("after 'a'", "'b', 'c'")),
        ({"d": ["a"]}, ("after 'd'", "nothing")),
    ],
)
def test_what_no_step_can_do_is_refused(ahead, facts):
    refuses(lambda: frontiers(LIST, ahead, "forward"), *facts)


@pytest.mark.parametrize("wrong", [True, "layers", 1.5])
def test_a_prefetch_that_is_neither_a_depth_nor_lists_is_refused(wrong):
    with refusing("Prefetch:", "0", error=TypeError):
        as_prefetch(wrong)
    refuses(lambda: as_prefetch(-1), "forward=-1", "at least 0")
    with refusing("backward['a']", "='b'", error=TypeError):
        Prefetch(backward={"a": "b"})


def test_a_model_without_units_takes_the_default():
    assert frontiers([], as_prefetch(None).forward, "forward") == frontiers([], 2, "forward") == []
    assert as_prefetch(2) == Prefetch(2, 2)


@pytest.mark.parametrize(
    ("depth", "run"),
    [
        (0, (0, 8)),
        (1, (1, 7)),  # the first layer finds nothing on its way, the last one has nothing to start
        (2, (1, 6)),
        (3, (1, 5)),
        (7, (7, 7)),
    ],
)
def test_layers_between_the_first_and_the_last_look_alike(depth, run):
    low, high = steady(frontiers(["layers"] * 8, depth, "forward"), 0, 1, 8)
    assert (low, high) == run or high - low == run[1] - run[0] == 0


def test_a_loop_after_another_unit_looks_alike_from_its_first_iteration():
    reached = frontiers(["embed", *["layers"] * 8, "head"], 1, "forward")
    assert steady(reached, 1, 1, 8) == (0, 7)


def test_two_units_in_an_iteration_look_alike_together():
    reached = frontiers(["attn", "mlp"] * 8, 1, "forward")
    assert steady(reached, 0, 2, 8) == (1, 7)
    reached = frontiers(["attn", "mlp"] * 8, 3, "forward")
    assert steady(reached, 0, 2, 8) == (1, 6)
    reached = frontiers(["attn", "mlp"] * 8, {"attn": ["mlp"]}, "forward")
    assert steady(reached, 0, 2, 8) == (0, 8)


def test_a_loop_without_gathers_looks_alike_throughout():
    assert steady([], 0, 0, 8) == (0, 8)
