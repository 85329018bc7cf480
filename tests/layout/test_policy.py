"""Policies of units: defaults from the strategy, overrides by glob, and what is refused."""

import functools
import re
from typing import Any

import jax
import pytest

from jfsdp.layout.policy import SaveNames, UnitPolicy, resolve_policies
from jfsdp.layout.precision import MixedPrecisionPolicy
from tests.refusals import refuses, refusing
from tests.ways import WAYS

UNITS = ("", "embed", "layers.0", "layers.1", "head")
BF16 = MixedPrecisionPolicy("bfloat16")
F16 = MixedPrecisionPolicy("float16")


def resolve(
    strategy="full_shard", *, reshard=None, remat: Any = "full", per_unit=None, node_size=lambda: 4
) -> dict[str, UnitPolicy]:
    return resolve_policies(
        UNITS,
        strategy=WAYS[strategy],
        mp_policy=BF16,
        reshard_after_forward=reshard,
        remat=remat,
        per_unit=per_unit,
        node_size=node_size,
        host_size=lambda: 8,
    )


@pytest.mark.parametrize("strategy", WAYS)
def test_units_are_resharded_where_the_strategy_keeps_them_split_and_the_root_never(strategy):
    policies = resolve(strategy)
    expected = {"full_shard": True, "all": True, "hfsdp": True, "node": 4}.get(strategy, False)
    assert policies.pop("").reshard_after_forward is False
    assert {policy.reshard_after_forward for policy in policies.values()} == {expected}


@pytest.mark.parametrize("remat", ["none", "full", "dots", ("a", "b"), jax.checkpoint_policies.everything_saveable])
def test_remat_is_for_the_units_below_the_root(remat):
    policies = resolve(remat=remat)
    assert policies.pop("").remat == "none"
    assert {policy.remat for policy in policies.values()} == {remat}


def test_overrides_go_by_glob_over_unit_names():
    policies = resolve(
        per_unit={"layers.*": {"remat": "dots"}, "head": {"mp_policy": F16, "reshard_after_forward": False}}
    )
    assert [policies[name].remat for name in UNITS] == ["none", "full", "dots", "dots", "full"]
    assert [policies[name].mp_policy for name in UNITS] == [BF16, BF16, BF16, BF16, F16]
    assert [policies[name].reshard_after_forward for name in UNITS] == [False, True, True, True, False]


def test_the_root_is_named_by_the_empty_glob():
    policies = resolve(per_unit={"": {"remat": "full", "reshard_after_forward": True}})
    assert policies[""] == UnitPolicy(BF16, True, "full")
    assert policies["head"] == UnitPolicy(BF16, True, "full")


def test_overrides_that_contradict_each_other_are_refused_and_others_add_up():
    message = "unit 'layers.1': per_unit sets remat='dots', and 'layers.1' sets 'none'; make one of the globs narrower"
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve(per_unit={"layers.*": {"remat": "dots"}, "layers.1": {"remat": "none"}})
    both = {"layers.*": {"remat": "dots"}, "layers.1": {"remat": "dots", "reshard_after_forward": False}}
    assert resolve(per_unit=both)["layers.1"] == UnitPolicy(BF16, False, "dots")


def test_overrides_that_say_nothing_choose_nothing_or_are_unknown_are_refused():
    for per_unit, facts in (
        ({"head": {}}, ("per_unit", "'head'", "mp_policy", "reshard_after_forward")),
        ({"layer.*": {"remat": "dots"}}, ("per_unit", "'layer.*'", "''", "'embed'", "'layers.0'")),
        ({"head": {"prefetch": 2}}, ("'prefetch'", "mp_policy", "reshard_after_forward")),
    ):
        refuses(functools.partial(resolve, per_unit=per_unit), *facts)
    refuses(lambda: resolve(per_unit={"head": {"mp_policy": "bfloat16"}}), "mp_policy", error=TypeError)


def test_an_override_may_reset_to_the_default():
    policies = resolve(reshard=False, per_unit={"head": {"reshard_after_forward": None}})
    assert policies["head"].reshard_after_forward
    assert not policies["embed"].reshard_after_forward


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "kept"])
def test_resharding_under_a_strategy_that_keeps_parameters_whole_is_refused(strategy):
    for value in (True, 2):
        facts = f"reshard_after_forward={value}", f"'{strategy}'"
        refuses(functools.partial(resolve, strategy, reshard=value), *facts)
        per_unit = {"head": {"reshard_after_forward": value}}
        refuses(functools.partial(resolve, strategy, per_unit=per_unit), "unit 'head'", *facts)
    assert not resolve(strategy, reshard=False)["head"].reshard_after_forward


@pytest.mark.parametrize("strategy", WAYS)
def test_resharding_to_one_device_is_not_resharding(strategy):
    assert {policy.reshard_after_forward for policy in resolve(strategy, reshard=1).values()} == {False}
    assert resolve(strategy, reshard=1) == resolve(strategy, reshard=False)


def test_fewer_than_one_device_are_refused():
    with refusing("(root)", "reshard_after_forward=0", "at least 1"):
        resolve(reshard=0)


def unknown() -> int:
    raise ValueError("nobody knows the hosts")


def test_node_needs_to_know_how_many_devices_share_a_host():
    with refusing("'embed'", "reshard_after_forward='node'", "reshard_"):
        resolve("node", node_size=unknown)


@pytest.mark.parametrize(("strategy", "reshard"), [("node", 2), ("node", True), ("full_shard", None)])
def test_hosts_are_asked_for_only_where_the_strategy_needs_them(strategy, reshard):
    assert resolve(strategy, reshard=reshard, node_size=unknown)["embed"].reshard_after_forward is (reshard or True)


def test_names_to_save_are_kept_as_a_tuple_and_each_is_a_name_once():
    for field in ("save", "offload"):
        from_list: Any = {field: ["a", "b"]}
        remat = SaveNames(**from_list)
        assert remat == SaveNames(**{field: ("a", "b")}) and hash(remat)
        assert resolve(remat=remat)["head"].remat == remat
        for names in ("attention", None, ("a", 1)):
            wrong: Any = {field: names}
            refuses(functools.partial(SaveNames, **wrong), f"SaveNames: {field}", "text", error=TypeError)
    refuses(lambda: SaveNames(("a", "b", "c"), ("c", "b", "d")), "SaveNames:")


def test_a_remat_of_another_kind_is_refused():
    for remat, fact in (
        (True, "remat=True must be none, full, dots or"),
        (("a", 1), "remat[1]=1 must be text"),
        (["a", "b"], "jfsdp.SaveNames"),
        ((), "is unknown"),
        ("FULL", "jfsdp.SaveNames"),
        (SaveNames, "is unknown"),
        (lambda: True, "f(primitive)"),
    ):
        error = TypeError if "must be" in fact else ValueError
        refuses(functools.partial(resolve, remat=remat), "'embed'", fact, error=error)


def test_dtypes_are_kept_as_names_and_an_unknown_one_lists_them():
    for given, kept in (
        ("bfloat16", "bfloat16"),
        (jax.numpy.bfloat16, "bfloat16"),
        (jax.numpy.dtype("float16"), "float16"),
    ):
        policy = MixedPrecisionPolicy(given, reduce_dtype=given, output_dtype=given)
        assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (kept, kept, kept)
    for field in ("param_dtype", "reduce_dtype", "output_dtype"):
        for dtype in ("int8", "bf16", "float64", object()):
            wrong: Any = {field: dtype}
            refuses(functools.partial(MixedPrecisionPolicy, **wrong), field, "float32, bfloat16, float16")


def test_only_floating_leaves_are_used_in_another_dtype():
    for dtype, used in {"float32": "bfloat16", "float16": "bfloat16", "int32": "int32", "bool": "bool"}.items():
        assert BF16.use_dtype(dtype) == used
        assert MixedPrecisionPolicy().use_dtype(dtype) == dtype
