"""Policies of units: defaults from the strategy, overrides by glob, and what is refused."""

import re
from typing import Any

import jax
import pytest

from jfsdp.layout.policy import SaveNames, UnitPolicy, resolve_policies
from jfsdp.layout.precision import MixedPrecisionPolicy
from tests.refusals import refusing
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
    message = "unit 'layers.1': per_unit says remat='dots', and by 'layers.1' 'none'; make one of the globs narrower"
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve(per_unit={"layers.*": {"remat": "dots"}, "layers.1": {"remat": "none"}})
    both = {"layers.*": {"remat": "dots"}, "layers.1": {"remat": "dots", "reshard_after_forward": False}}
    assert resolve(per_unit=both)["layers.1"] == UnitPolicy(BF16, False, "dots")


def test_overrides_that_say_nothing_are_refused():
    with refusing("per_unit", "'head'", "mp_policy", "reshard_after_forward"):
        resolve(per_unit={"head": {}})


def test_an_override_may_reset_to_the_default():
    policies = resolve(reshard=False, per_unit={"head": {"reshard_after_forward": None}})
    assert policies["head"].reshard_after_forward
    assert not policies["embed"].reshard_after_forward


def test_a_glob_that_matches_no_unit_lists_the_units():
    with refusing("per_unit", "'layer.*'", "''", "'embed'", "'layers.0'"):
        resolve(per_unit={"layer.*": {"remat": "dots"}})


def test_an_unknown_setting_lists_the_settings():
    with refusing("'prefetch'", "mp_policy", "reshard_after_forward"):
        resolve(per_unit={"head": {"prefetch": 2}})


@pytest.mark.parametrize("remat", ["some", "", "FULL"])
def test_an_unknown_remat_lists_the_remats(remat):
    with refusing("'embed'", "jfsdp.SaveNames"):
        resolve(remat=remat)


@pytest.mark.parametrize("value", [True, 2])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "kept"])
def test_resharding_under_a_strategy_that_keeps_parameters_whole_is_refused(strategy, value):
    with refusing(f"reshard_after_forward={value}", f"'{strategy}'"):
        resolve(strategy, reshard=value)
    with refusing("unit 'head'", f"reshard_after_forward={value}", f"'{strategy}'"):
        resolve(strategy, per_unit={"head": {"reshard_after_forward": value}})
    assert not resolve(strategy, reshard=False)["head"].reshard_after_forward


@pytest.mark.parametrize("strategy", WAYS)
def test_resharding_to_one_device_is_not_resharding(strategy):
    assert {policy.reshard_after_forward for policy in resolve(strategy, reshard=1).values()} == {False}
    assert resolve(strategy, reshard=1) == resolve(strategy, reshard=False)


@pytest.mark.parametrize("value", [0, -1, -8])
def test_fewer_than_one_device_are_refused(value):
    with refusing("(root)", f"reshard_after_forward={value}", "at least 1"):
        resolve(reshard=value)


def unknown() -> int:
    raise ValueError("nobody knows the hosts")


def test_node_needs_to_know_how_many_devices_share_a_host():
    with refusing("'embed'", "reshard_after_forward='node'", "reshard_"):
        resolve("node", node_size=unknown)


@pytest.mark.parametrize(("strategy", "reshard"), [("node", 2), ("node", True), ("full_shard", None)])
def test_hosts_are_asked_for_only_where_the_strategy_needs_them(strategy, reshard):
    assert resolve(strategy, reshard=reshard, node_size=unknown)["embed"].reshard_after_forward is (reshard or True)


@pytest.mark.parametrize("field", ["save", "offload"])
def test_names_to_save_are_kept_as_a_tuple(field):
    from_list: Any = {field: ["a", "b"]}
    remat = SaveNames(**from_list)
    assert getattr(remat, field) == ("a", "b")
    assert hash(remat) == hash(SaveNames(**{field: ("a", "b")}))
    assert resolve(remat=remat)["head"].remat == SaveNames(**{field: ("a", "b")})


@pytest.mark.parametrize("field", ["save", "offload"])
@pytest.mark.parametrize("names", ["attention", None, 3, ("a", 1)])
def test_names_that_are_no_names_are_refused(field, names):
    with refusing(f"SaveNames: {field}", "text", error=TypeError):
        SaveNames(**{field: names})


def test_names_both_saved_and_offloaded_are_refused():
    with refusing("SaveNames:"):
        SaveNames(("a", "b", "c"), ("c", "b", "d"))


@pytest.mark.parametrize(
    ("remat", "told"),
    [
        (True, "remat=True must be text or a list of text or a SaveNames or a function"),
        (3, "remat=3 must be text"),
        (("a", 1), r"remat\[1\]=1 must be text"),
        (["a", "b"], "remat .* is unknown"),
        ((), "remat .* is unknown"),
        (SaveNames, "remat .* is unknown"),
        (lambda: True, r"remat is called as f\(primitive\), and takes something else: too many positional arguments"),
    ],
)
def test_a_remat_of_another_kind_is_refused(remat, told):
    with pytest.raises(TypeError if "must be" in told else ValueError, match=f"unit 'embed': .*{told}"):
        resolve(remat=remat)


def test_a_glob_of_per_unit_means_what_it_means_among_the_units():
    policies = resolve_policies(
        ["", "layers.0", "layers.0.mlp"],
        strategy=WAYS["full_shard"],
        mp_policy=BF16,
        reshard_after_forward=None,
        remat="full",
        per_unit={"layers.*": {"remat": "dots"}},
        node_size=lambda: 4,
    )
    assert [policy.remat for policy in policies.values()] == ["none", "dots", "full"]


def test_a_precision_that_is_no_policy_is_refused():
    with pytest.raises(TypeError, match="mp_policy"):
        resolve(per_unit={"head": {"mp_policy": "bfloat16"}})


@pytest.mark.parametrize(
    ("given", "kept"),
    [("bfloat16", "bfloat16"), (jax.numpy.bfloat16, "bfloat16"), (jax.numpy.dtype("float16"), "float16"), (None, None)],
)
def test_dtypes_are_kept_as_names(given, kept):
    policy = MixedPrecisionPolicy(given, reduce_dtype=given, output_dtype=given)
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (kept, kept, kept)


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype", "output_dtype"])
@pytest.mark.parametrize("dtype", ["int8", "bf16", "float64", "float", object()])
def test_an_unknown_dtype_lists_the_dtypes(field, dtype):
    with refusing(field, "float32, bfloat16, float16"):
        MixedPrecisionPolicy(**{field: dtype})


@pytest.mark.parametrize(
    ("dtype", "used"), [("float32", "bfloat16"), ("float16", "bfloat16"), ("int32", "int32"), ("bool", "bool")]
)
def test_only_floating_leaves_are_used_in_another_dtype(dtype, used):
    assert BF16.use_dtype(dtype) == used
    assert MixedPrecisionPolicy().use_dtype(dtype) == dtype
