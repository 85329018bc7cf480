"""Units: how modules are chosen, who owns a leaf, how stacks are recognised."""

import functools
from typing import Any

from flax import nnx

from jfsdp.layout.units import ROOT, Unit, UnitInfo, by_size, resolve_units
from jfsdp.modules.nnx import NNXModel
from tests.refusals import refuses, refusing


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(4, 8, rngs=rngs)  # 40 parameters
        self.down = nnx.Linear(8, 4, rngs=rngs)  # 36

    def __call__(self, x):
        return self.down(self.up(x))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(4, rngs=rngs)  # 4
        self.mlp = Mlp(rngs)  # 76

    def __call__(self, x):
        return x + self.mlp(self.norm(x))


class LastBlock(Block):
    pass


class Net(nnx.Module):
    """Embedding, a list of blocks, head."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 4, rngs=rngs)  # 64
        self.blocks = nnx.List([Block(rngs), LastBlock(rngs)])
        self.head = nnx.Linear(4, 16, use_bias=False, rngs=rngs)  # 64


class Tied(nnx.Module):
    """The head's kernel is the embedding's table."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 4, rngs=rngs)
        self.block = Block(rngs)
        self.head = nnx.Linear(4, 16, use_bias=False, rngs=rngs)
        self.head.kernel = self.embed.embedding


class Wrapped(nnx.Module):
    def __init__(self, rngs):
        self.inner = Tied(rngs)
        self.norm = nnx.RMSNorm(4, rngs=rngs)


def stacked(make, num):
    return lambda rngs: nnx.split_rngs(splits=num)(nnx.vmap(make, in_axes=0, out_axes=0))(rngs)


class Scanned(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 4, rngs=rngs)
        self.blocks = stacked(Block, 5)(rngs)


class Square(nnx.Module):
    """Not a stack, but its matrices all share their first dim."""

    def __init__(self, rngs):
        self.query = nnx.Linear(64, 64, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(64, 64, use_bias=False, rngs=rngs)


def resolve(model: Any, *units: Any) -> dict[str, UnitInfo]:
    nnx_model = NNXModel(model)
    shapes = {path: tuple(leaf.shape) for path, leaf in nnx_model.params.items()}
    return resolve_units(units, nnx_model.modules, shapes)


def leaves_below(units: dict[str, UnitInfo], name: str) -> set[str]:
    return set(units[name].leaves)


NET_LEAVES = set(NNXModel(Net).params)


def test_every_leaf_has_exactly_one_owner_and_root_comes_first():
    inside = lambda path, cls, size: "mlp" in path  # noqa: E731
    for choices in ([], [Block], ["blocks.*", "blocks.*.mlp"], [Mlp, nnx.Embed, nnx.RMSNorm], [by_size(1)], [inside]):
        units = resolve(Net, *choices)
        assert sorted(leaf for unit in units.values() for leaf in unit.leaves) == sorted(NET_LEAVES)
        assert next(iter(units)) == ROOT


def test_a_class_chooses_its_modules_and_those_of_its_subclasses():
    units = resolve(Net, Block)
    classes = {ROOT: "Net", "blocks.0": "Block", "blocks.1": "LastBlock"}
    assert {name: unit.cls for name, unit in units.items()} == classes
    assert leaves_below(units, ROOT) == {"embed.embedding", "head.kernel"}
    assert leaves_below(units, "blocks.1") == {leaf for leaf in NET_LEAVES if leaf.startswith("blocks.1.")}
    assert set(resolve(Net, LastBlock)) == {ROOT, "blocks.1"}, "a subclass does not choose its base"


def test_a_glob_matches_name_by_name_and_stays_on_its_level():
    for pattern, names in {
        "blocks.[0]": {"blocks.0"},
        "*": {"embed", "blocks", "head"},
        "*.*.mlp": {"blocks.0.mlp", "blocks.1.mlp"},
        "?ead": {"head"},
    }.items():
        assert set(resolve(Net, pattern)) == {ROOT} | names


def test_a_predicate_sees_path_class_and_number_of_parameters():
    seen = {}

    def choose(path, cls, num_parameters):
        seen[path] = (cls, num_parameters)
        return path == "blocks.0.mlp"

    units = resolve(Net, choose)
    assert set(units) == {ROOT, "blocks.0.mlp"}
    assert seen["embed"] == (nnx.Embed, 64)
    assert seen["blocks.0.mlp.up"] == (nnx.Linear, 40)
    assert seen["blocks.0"] == (Block, 4)  # of its 80, 76 are claimed below
    assert seen["blocks.1"] == (LastBlock, 80)
    assert ROOT not in seen


def test_by_size_asks_children_first_and_counts_what_they_left():
    """As PyTorch's size_based_auto_wrap_policy: a parent counts only parameters that no chosen child holds."""
    assert set(resolve(Net, by_size(40))) == {ROOT, "embed", "head"} | {
        f"blocks.{i}{name}" for i in (0, 1) for name in ("", ".mlp.up")
    }
    assert set(resolve(Net, by_size(76))) == {ROOT, "blocks.0.mlp", "blocks.1.mlp"}
    with refusing("is_large matches no module"):  # a list of modules has no `__call__` to gather around
        resolve(Net, by_size(100))


def test_inner_units_own_their_leaves():
    units = resolve(Net, Block, Mlp)
    assert leaves_below(units, "blocks.0") == {"blocks.0.norm.scale"}
    assert leaves_below(units, "blocks.0.mlp") == {leaf for leaf in NET_LEAVES if leaf.startswith("blocks.0.mlp.")}
    assert leaves_below(units, ROOT) == {"embed.embedding", "head.kernel"}
    assert resolve(Net, Mlp, nnx.Linear)["blocks.0.mlp"].leaves == (), "a unit without leaves stays one"


def test_stacks_are_recognised_by_their_shared_first_dim():
    units = resolve(Scanned, Block)
    assert (units["blocks"].stacked, units[ROOT].stacked) == (1, 0)
    assert (units["blocks"].is_guessed, units[ROOT].is_guessed) == (True, False)
    assert {unit.stacked for unit in resolve(Net, Block, nnx.Embed).values()} == {0}, "a list is no stack"


def test_a_stated_number_of_layer_dims_outranks_the_guess():
    assert resolve(Scanned, Unit(Block, stacked=0))["blocks"].stacked == 0
    assert not resolve(Scanned, Unit(Block, stacked=1))["blocks"].is_guessed
    assert resolve(Net, Unit(Block, stacked=1))["blocks.0"].stacked == 1
    assert resolve(Scanned, {"match": Block, "stacked": 1}) == resolve(Scanned, Unit(Block, stacked=1))
    with refusing("blocks.0", "no 2", "stacked=2"):
        resolve(Net, Unit(Block, stacked=2))


def test_matrices_that_share_their_first_dim_are_not_taken_for_a_stack():
    """An attention without biases is made of such; a stack of matrices alone has to be stated."""
    assert resolve(lambda rngs: nnx.List([Square(rngs)]), Square)["0"].stacked == 0
    assert resolve(lambda rngs: nnx.List([Square(rngs)]), Unit(Square, stacked=1))["0"].stacked == 1


def test_a_choice_that_matches_nothing_lists_classes_and_paths():
    for match in (nnx.Conv, "block", "blocks.*.*.*.*", "Blocks.*", lambda path, cls, size: False):
        refuses(
            functools.partial(resolve, Net, match),
            *("matches no module", "Block", "LastBlock", "Mlp", "Net", "Embed"),
            *("paths:", "embed", "blocks", "blocks.0", "blocks.1"),
        )


def test_the_name_of_a_class_as_text_is_told_to_pass_the_class():
    error = refuses(functools.partial(resolve, Net, "Block"), "'Block'", "units=[Block]", "path glob", "blocks")
    assert "classes:" not in str(error)


def test_a_method_of_a_class_is_told_to_pass_the_class():
    for method in (nnx.Linear.__call__, Block.__call__):  # one of them takes as many arguments as a predicate
        name = method.__qualname__.partition(".")[0]
        refuses(functools.partial(resolve, Net, method), f"{name}.__call__", f"units=[{name}]", error=TypeError)


def test_choices_of_one_module_and_of_another_kind_are_refused():
    for choices, name in (
        ((Block, "blocks.1"), "blocks."),
        (("head", nnx.Linear), "head"),
        ((Block, Block), "blocks."),
    ):
        refuses(functools.partial(resolve, Net, *choices), name, "both claim")
    for choice in (3, None, Unit(("a", "b"))):
        facts = "module class", "glob", "predicate"
        refuses(functools.partial(resolve, Net, choice), *facts, error=TypeError)
    for choice, name in ((Block(nnx.Rngs(0)), "Block"), (Unit(nnx.Linear(2, 2, rngs=nnx.Rngs(0))), "Linear")):
        refuses(functools.partial(resolve, Net, choice), f"unit {name}", f"units=[{name}]", error=TypeError)


def test_a_tied_weight_belongs_to_the_innermost_unit_around_both_its_users():
    for choice, users in ((nnx.Embed, ("embed",)), ("head", ()), ("*", ("embed", "head")), (Tied, ())):
        owner = resolve(Tied, choice)[ROOT]
        assert "embed.embedding" in owner.leaves
        assert owner.shared == ((("embed.embedding", users),) if users else ())
    assert leaves_below(resolve(Tied, Block), ROOT) == {"embed.embedding"}
    units = resolve(Wrapped, Tied)
    assert "inner.embed.embedding" in units["inner"].leaves
    assert leaves_below(units, ROOT) == {"norm.scale"}


def test_units_stand_in_the_order_of_the_layers():
    units = resolve(lambda rngs: nnx.List([Block(rngs) for _ in range(11)]), Block)
    assert list(units) == [ROOT, *map(str, range(11))]
