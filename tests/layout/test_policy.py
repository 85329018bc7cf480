"""Policies of units: defaults from the strategy, overrides by glob, and what is refused."""

import jax
import pytest
from flax import nnx

import jfsdp
from jfsdp.layout.policy import UnitPolicy, resolve_policies
from jfsdp.layout.precision import MixedPrecisionPolicy
from jfsdp.layout.strategy import STRATEGIES, get_strategy

UNITS = ("", "embed", "layers.0", "layers.1", "head")
BF16 = MixedPrecisionPolicy("bfloat16")
F16 = MixedPrecisionPolicy("float16")


def resolve(strategy="full_shard", *, reshard=None, remat="full", per_unit=None) -> dict[str, UnitPolicy]:
    return resolve_policies(
        UNITS,
        strategy=get_strategy(strategy),
        mp_policy=BF16,
        reshard_after_forward=reshard,
        remat=remat,
        per_unit=per_unit,
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_units_are_resharded_where_the_strategy_keeps_them_split_and_the_root_never(strategy):
    resharded = {name for name, policy in resolve(strategy).items() if policy.reshard_after_forward}
    expected = {"full_shard", "hybrid_shard", "hfsdp"}
    assert resharded == (set(UNITS) - {""} if strategy in expected else set())


def test_asked_for_resharding_holds_for_the_root_too():
    assert all(policy.reshard_after_forward for policy in resolve(reshard=True).values())
    assert not any(policy.reshard_after_forward for policy in resolve(reshard=False).values())


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


def test_later_overrides_win_over_earlier_ones():
    assert resolve(per_unit={"layers.*": {"remat": "dots"}, "layers.1": {"remat": "none"}})["layers.1"].remat == "none"


def test_an_override_may_reset_to_the_default():
    policies = resolve(reshard=False, per_unit={"head": {"reshard_after_forward": None}})
    assert policies["head"].reshard_after_forward
    assert not policies["embed"].reshard_after_forward


def test_a_glob_that_matches_no_unit_lists_the_units():
    with pytest.raises(
        ValueError, match=r"per_unit 'layer\.\*' matches no unit; the units are '', 'embed', 'layers.0'"
    ):
        resolve(per_unit={"layer.*": {"remat": "dots"}})


def test_an_unknown_setting_lists_the_settings():
    with pytest.raises(
        ValueError, match="'prefetch' is unknown; the settings are mp_policy, reshard_after_forward, remat"
    ):
        resolve(per_unit={"head": {"prefetch": 2}})


@pytest.mark.parametrize("remat", ["some", "", "FULL"])
def test_an_unknown_remat_lists_the_remats(remat):
    with pytest.raises(
        ValueError, match=r"unit 'embed': remat .* is unknown; use none, full, dots, a tuple of names, or a policy"
    ):
        resolve(remat=remat)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "shard_grad_op", "hybrid_shard_zero2"])
def test_resharding_under_a_strategy_that_keeps_parameters_whole_is_refused(strategy):
    with pytest.raises(ValueError, match=f"reshard_after_forward=True contradicts strategy '{strategy}'"):
        resolve(strategy, reshard=True)
    with pytest.raises(ValueError, match=f"unit 'head': reshard_after_forward=True contradicts strategy '{strategy}'"):
        resolve(strategy, per_unit={"head": {"reshard_after_forward": True}})
    assert not resolve(strategy, reshard=False)["head"].reshard_after_forward


@pytest.mark.parametrize("value", [2, 8, -1, 1.0, "yes"])
def test_resharding_to_a_number_of_devices_is_refused(value):
    with pytest.raises(ValueError, match=r"is not None, True or False; resharding to a number of devices \(hpZ\)"):
        resolve(reshard=value)


@pytest.mark.parametrize("value", [0, 1])
def test_the_numbers_zero_and_one_are_not_booleans(value):
    with pytest.raises(ValueError, match="is not None, True or False"):
        resolve(reshard=value)


@pytest.mark.parametrize("remat", [True, ["a", "b"], 3])
def test_a_remat_of_another_kind_is_refused(remat):
    with pytest.raises(ValueError, match=r"remat .* is unknown"):
        resolve(remat=remat)


def test_a_glob_of_per_unit_means_what_it_means_among_the_units():
    policies = resolve_policies(
        ["", "layers.0", "layers.0.mlp"],
        strategy=get_strategy("full_shard"),
        mp_policy=BF16,
        reshard_after_forward=None,
        remat="full",
        per_unit={"layers.*": {"remat": "dots"}},
    )
    assert [policy.remat for policy in policies.values()] == ["none", "dots", "full"]


def shard_linear(**settings):
    model = lambda rngs: nnx.List([nnx.Linear(8, 8, rngs=rngs)])  # noqa: E731
    return jfsdp.fully_shard(model, mesh=jfsdp.make_abstract_mesh({"fsdp": 8}), units=[nnx.Linear], **settings)


def test_a_reduction_in_another_dtype_than_the_parameters_is_refused():
    with pytest.raises(ValueError, match="reduce_dtype 'float32' differs from param_dtype 'bfloat16': engine 'auto'"):
        shard_linear(mp_policy=MixedPrecisionPolicy("bfloat16", reduce_dtype="float32"))
    assert shard_linear(mp_policy=MixedPrecisionPolicy("bfloat16", reduce_dtype="bfloat16"))


def test_a_reduction_in_another_dtype_is_refused_for_a_single_unit_too():
    with pytest.raises(ValueError, match="reduce_dtype 'float32' differs from param_dtype 'bfloat16'"):
        shard_linear(per_unit={"0": {"mp_policy": MixedPrecisionPolicy("bfloat16", reduce_dtype="float32")}})


def test_a_precision_that_is_no_policy_is_refused():
    with pytest.raises(ValueError, match="mp_policy"):
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
    with pytest.raises(ValueError, match=f"{field} .* is not one of float32, bfloat16, float16"):
        MixedPrecisionPolicy(**{field: dtype})


@pytest.mark.parametrize(
    ("dtype", "used"), [("float32", "bfloat16"), ("float16", "bfloat16"), ("int32", "int32"), ("bool", "bool")]
)
def test_only_floating_leaves_are_used_in_another_dtype(dtype, used):
    assert BF16.use_dtype(dtype) == used
    assert MixedPrecisionPolicy().use_dtype(dtype) == dtype
