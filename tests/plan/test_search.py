"""The search for a fast step that fits; but for one test with a planner made of arithmetic."""

import dataclasses
import functools
import itertools
import json
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jfsdp.plan.bound import matmul_elements
from jfsdp.plan.cluster.hardware import Cluster, find_gpu
from jfsdp.plan.cluster.target import PlanUnavailable, topology_devices
from jfsdp.plan.jobs import INPUTS, bound_job, can_offload, mesh_sizes, shard_planned
from jfsdp.plan.search.search import Outcome, SearchSpace, pareto_front, search_job
from jfsdp.plan.search.space import changes, leaner, placements, recipe_of, splits, xla_choices
from jfsdp.trainer.options import StepOptions
from jfsdp.trainer.parse import read_fields, write
from jfsdp.trainer.recipes import load_recipe
from jfsdp.trainer.run.config import TrainConfig
from tests.options import changed, made
from tests.refusals import check_facts, refuses

NODE, TWO_NODES = Cluster(find_gpu("h100")), Cluster(find_gpu("h100"), 2)
TINY = made(StepOptions, model="llama-tiny", seq_len=64)
SMALL = SearchSpace(
    ("full_shard", "replicas"),
    ("full", "none", "dots"),
    None,
    ((((("a", 1),), (("b", 2),)),)),
    2,
    tensor_sizes=(),
    context_sizes=(),
)
ONE = SearchSpace(("full_shard",), (), (), (), programs=(), tensor_sizes=(), context_sizes=())
REMATS: dict[Any, tuple[float, float]] = {
    "full": (1.3, 1),
    "dots": (1.1, 4),
    "none": (1.0, 12),
    INPUTS: (1.35, 0.5),
}  # seconds and GiB of a row


def fake_plan(options, cluster, *, reserve_bytes=0, documents_per_row=1):
    """A step of 1 s and 0.2 s per row, of which replicas and the option a=1 save something."""
    row_s, row_gib = REMATS[options.remat]
    rows = options.batch_per_device
    saved_s = 0.3 * ("replica" in dict(options.mesh)) + 0.1 * (("a", 1) in options.xla)
    step_s = 1.0 + 0.2 * row_s * rows + 0.01 * (options.accumulate - 1) - saved_s
    needed = int((5 + row_gib * rows / options.accumulate) * 2**30)
    return types.SimpleNamespace(
        fits=needed <= cluster.gpu.memory_bytes - reserve_bytes,
        needed_bytes=needed,
        step_s=step_s,
        items_per_s=rows * 64 / step_s,
        mfu=None,
        layout=types.SimpleNamespace(mesh_sizes=tuple(mesh_sizes(options.mesh, cluster.num_devices).items())),
        timeline=types.SimpleNamespace(exposed_s=0.1),
        compiled=types.SimpleNamespace(compile_s=0.0),
    )


def changing(change):
    """Return a planner that changes what the fake one says."""

    def planner(options, cluster, **more):
        change(options, plan := fake_plan(options, cluster, **more))
        return plan

    return planner


def search(options=TINY, cluster=NODE, space=SMALL, planner=fake_plan, **more):
    return search_job(options, cluster, space, planner=planner, **more)


@dataclasses.dataclass(frozen=True)
class Point:
    needed_bytes: int
    item_s: float


@pytest.fixture(scope="module", autouse=True)
def bounds():
    """A bound is a function of the cluster and of options but XLA's; searches here ask for the same ones often."""
    cached = functools.cache(bound_job)
    with pytest.MonkeyPatch.context() as patch:
        bound = lambda options, cluster, device: cached(changed(options, xla=()), cluster, device)  # noqa: E731
        patch.setattr("jfsdp.plan.search.search.bound_job", bound)
        yield


@pytest.fixture(scope="module")
def found():
    return search()


def test_the_front_has_what_none_beats_and_of_equals_the_first():
    points: list[Any] = [
        Point(3, 1.0),
        Point(1, 5.0),
        Point(2, 6.0),
        Point(2, 4.0),
        Point(2, 4.0),
        Point(4, 1.0),
        Point(9, 0.5),
    ]
    assert pareto_front(points) == (Point(1, 5.0), Point(2, 4.0), Point(3, 1.0), Point(9, 0.5))
    assert pareto_front(points)[1] is points[3]
    assert pareto_front([]) == ()


def test_what_was_given_is_tried_first_and_the_best_combines_every_stage(found):
    assert found.default.options == TINY and found.default.label == "as given" and not found.default.changes
    everything = [one for one in found.tried if one.fits]
    assert found.best is min(everything, key=lambda one: one.item_s)
    wanted = {
        "mesh": "replica=-1,fsdp=4",
        "remat": "dots",
        "accumulate": 2,
        "reshard_after_backward": False,
        "batch_per_device": 32,
        "xla": ("a=1",),
    }
    assert found.best.changes == read_fields(StepOptions, wanted)
    assert found.gain == pytest.approx(1.26 / ((1 + 0.01 - 0.4 + 0.22 * 32) / 32))
    assert found.is_complete


def test_batches_double_until_one_does_not_fit(found):
    mesh = {"mesh": (("replica", -1), ("fsdp", 4)), "xla": ()}
    rows = {
        one.options.batch_per_device: one.fits
        for one in found.tried
        if one.options.remat == "dots" and mesh.items() <= dataclasses.asdict(one.options).items()
        and one.options.accumulate == 1
    }  # fmt: skip
    assert rows | {64: False} == {1: True, 2: True, 4: True, 8: True, 16: True, 32: False, 64: False}


def test_the_leanest_gets_more_rows_although_others_are_faster_with_one():
    """With so narrow a beam only the fastest remat, none, would be given more, and it has room for 4 only."""
    result = search(space=changed(SMALL, beam=1))
    assert max(one.options.batch_per_device for one in result.tried if one.options.remat == "none" and one.fits) == 4
    assert result.best and result.best.options.remat != "none" and result.best.options.batch_per_device >= 64


def test_a_recipe_is_what_training_then_runs(found, tmp_path):
    path = tmp_path / "winner.json"
    path.write_text(json.dumps(found.recipe()))
    config = load_recipe(TrainConfig(), str(path))
    for field in dataclasses.fields(StepOptions):
        assert getattr(config, field.name) == getattr(found.best.options, field.name), field.name
    assert set(found.recipe()) == {"model", "seq_len", *found.best.changes}


def test_a_recipe_keeps_an_option_that_was_set_back_to_its_default():
    base = {"model": "llama-tiny", "remat": "none", "steps": 7}
    found = recipe_of(StepOptions(model="llama-tiny", remat="full", accumulate=2), base)
    assert found == {"model": "llama-tiny", "remat": "full", "steps": 7, "accumulate": 2}


def test_what_cannot_be_compiled_is_recorded_and_the_search_goes_on():
    def planner(options, cluster, **more):
        if options.remat == "none":
            raise RuntimeError("RESOURCE_EXHAUSTED: too large\nand much more")
        return fake_plan(options, cluster, **more)

    result = search(planner=planner, space=changed(SMALL, beam=1))
    failed = [one for one in result.tried if one.outcome is Outcome.FAILED]
    assert {one.reason for one in failed} == {"RuntimeError: RESOURCE_EXHAUSTED: too large"}
    assert result.best and result.best.options.remat == "dots"


def test_options_that_training_would_refuse_are_recorded_without_a_plan():
    result = search(space=changed(SMALL, strategies=("full_shard",), remats=("full", "nonesuch")))
    (failed,) = [one for one in result.tried if one.options.remat == "nonesuch"][:1]
    assert failed.outcome is Outcome.IMPOSSIBLE and "nonesuch" in failed.reason


def test_no_compiler_at_all_ends_the_search():
    def planner(options, cluster, **more):
        raise PlanUnavailable("install one")

    with pytest.raises(PlanUnavailable, match="install one"):
        search(planner=planner)


def test_without_time_only_what_was_given_is_planned():
    result = search(budget_s=0)
    assert [one.is_planned for one in result.tried] == [True] + [False] * (len(result.tried) - 1)
    assert {one.reason for one in result.tried[1:]} == {"no time left"}
    assert result.best is result.default and result.gain == 1 and not result.is_complete


def test_state_that_does_not_fit_is_not_compiled():
    planned = []

    space = changed(ONE, strategies=("full_shard", "ddp"))
    planner = changing(lambda options, _: planned.append(options.strategy))
    result = search(made(StepOptions, model="llama-8b"), NODE, space, planner)
    (ddp,) = [one for one in result.tried if one.options.strategy == "ddp"]
    assert planned == ["full_shard"]
    assert ddp.outcome is Outcome.SKIPPED and "89.7 GiB of 76.1" in ddp.reason


def test_what_cannot_be_faster_is_not_compiled():
    result = search(planner=changing(lambda _, plan: vars(plan).update(items_per_s=1e12)))
    assert not any(one.is_planned for one in result.tried[1:])
    assert all(one.reason.startswith("cannot be faster: its ") for one in result.tried[1:])


def test_where_nothing_fits_the_least_is_named_and_what_would_help():
    def change(options, plan):
        plan.needed_bytes, plan.fits = plan.needed_bytes + 2**37 - 2**36 * len(options.offload), False

    result = search(planner=changing(change), space=ONE)
    assert result.best is None and result.gain is None and result.front == ()
    check_facts(result.advice, "5.5 GiB of 76.1 GiB", "offload=params,opt_state")
    assert "use more nodes" in result.advice
    assert result.to_dict()["best"] is result.to_dict()["recipe"] is None


@pytest.mark.parametrize(
    ("given", "levers"),
    [
        (
            {"seq_len": 65536},
            ["remat=full", "model_config=token_chunk=16384", "remat=offload:input", "offload=opt_state"],
        ),
        ({"seq_len": 40960, "mesh": "fsdp=4,tensor=2"}, ["remat=full", "model_config=token_chunk=20480"]),
        ({"seq_len": 65536, "mesh": "fsdp=4,tensor=-1"}, ["remat=full", "model_config=token_chunk=32768"]),
        ({"seq_len": 65537}, ["remat=full", "remat=offload:input", "offload=opt_state"]),
        ({"seq_len": 8192}, ["remat=full", "remat=offload:input", "offload=opt_state"]),
        ({"seq_len": 65536, "model_config": "token_chunk=1024"}, ["remat=full", "remat=offload:input"]),
    ],
)
def test_levers_of_long_rows_come_before_the_state_in_host_memory(given, levers):
    options = changed(TINY, remat="dots", **given)
    before, found = options, []
    for one in leaner(options, NODE):
        (name, value), *_ = (pair for pair in changes(one, before).items())
        found.append(f"{name}={write(value)}")
        before = one
    assert found[: len(levers)] == levers


def test_activations_are_not_offloaded_in_pipelines_or_by_an_xla_that_misorders_them(monkeypatch):
    assert can_offload(TINY) and not can_offload(changed(TINY, mesh="fsdp=4,pipe=2"))
    monkeypatch.setattr("jfsdp.plan.jobs.misorders_offloads", lambda: True)
    assert not can_offload(TINY)


def test_where_what_was_given_does_not_fit_smaller_microbatches_are_tried():
    given = changed(TINY, remat="none", batch_per_device=128)
    result = search(given, space=ONE)
    assert not result.default.fits and result.gain is None
    assert result.best and result.best.changes == {"remat": "full", "accumulate": 2}
    assert len(result.tried) == 3


def test_placements_keep_groups_inside_a_node_and_leave_other_axes():
    tried = list(placements(TINY, TWO_NODES, SearchSpace()))
    pairs = {(one.strategy, write(one.mesh)) for one in tried}
    assert {("full_shard", "fsdp=-1"), ("full_shard", "replica=-1,fsdp=8"), ("ddp", "fsdp=-1")} <= pairs
    assert {one.opt_over for one in tried if "replica" in dict(one.mesh)} == {None, ("replica", "fsdp")}
    (kept,) = [one for one in tried if one.reshard_after_forward == 8]
    bound_job(kept, TWO_NODES)
    for mesh in ("fsdp=4,tensor=2", "fsdp=4,tensor=-1"):
        given = changed(TINY, mesh=mesh)
        assert {write(one.mesh) for one in placements(given, NODE, ONE)} == {"fsdp=-1,tensor=2"}


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ((("foo", 8),), ("mesh axis 'foo'", "replica")),
        ((("fsdp", 0),), ("'fsdp': 0", "-1")),
        ((("fsdp", -1), ("replica", -1)), ("only one",)),
        ((("fsdp", 4),), ("--mesh fsdp=4", "sizes, 4,", "number of devices, 8", "-1")),
    ],
)
def test_a_mesh_that_no_cluster_has_is_refused_by_what_is_wrong(mesh, words):
    refuses(lambda: mesh_sizes(mesh, 8), *words)


def tensor_meshes(options, cluster=NODE, space=None, given=None):
    tried = splits(options, given or options, cluster, space or SearchSpace(context_sizes=()))
    return [(write(one.mesh), one.batch_per_device) for one in tried]


def test_axis_tensor_takes_the_divisors_of_a_host_and_the_global_batch_stays():
    assert tensor_meshes(TINY) == [("fsdp=-1", 1), *((f"fsdp=-1,tensor={size}", size) for size in (2, 4, 8))]
    split = changed(TINY, mesh="fsdp=-1,tensor=4", batch_per_device=8)
    assert tensor_meshes(split, given=TINY)[:2] == [("fsdp=-1", 2), ("fsdp=-1,tensor=2", 4)]
    groups = changed(TINY, opt_over="replica,fsdp", mesh="replica=-1,fsdp=4")
    found = {(one.opt_over, write(one.mesh)) for one in splits(groups, TINY, NODE, SearchSpace())}
    assert {(("replica", "fsdp"), "replica=-1,fsdp=2,tensor=2"), (None, "fsdp=-1,tensor=8")} <= found
    odd = changed(split, batch_per_device=6)
    assert [rows for _, rows in tensor_meshes(odd, given=TINY)] == [3, 6, 12], "6 rows of 4 devices are 1.5 of 1"
    hybrid = changed(TINY, mesh="replica=-1,fsdp=8")
    assert tensor_meshes(hybrid, TWO_NODES)[:2] == [("replica=-1,fsdp=8", 1), ("replica=-1,fsdp=4,tensor=2", 2)]


def test_axis_context_keeps_the_global_batch_one_row_at_a_time():
    tried = list(splits(TINY, TINY, NODE, SearchSpace(tensor_sizes=())))
    found = [(write(one.mesh), one.batch_per_device, one.accumulate) for one in tried]
    assert found == [("fsdp=-1", 1, 1), *((f"fsdp=-1,context={size}", size, size) for size in (2, 4, 8))]
    cut = changed(TINY, mesh="fsdp=-1,tensor=2", batch_per_device=2)
    meshes = {write(one.mesh) for one in splits(cut, TINY, NODE, SearchSpace(tensor_sizes=()))}
    assert "fsdp=-1,context=4,tensor=2" in meshes
    result = search(space=changed(ONE, context_sizes=(2, 8)))
    by_mesh = {write(one.options.mesh): one for one in result.tried}
    assert by_mesh["fsdp=-1,context=2"].is_planned and by_mesh["fsdp=-1,context=2"].mesh == {"fsdp": 4, "context": 2}
    check_facts(by_mesh["fsdp=-1,context=8"].reason, "4 heads", "size 8")


def test_a_search_tries_axis_tensor_and_says_which_sizes_cannot_be():
    """llama-tiny has 4 heads and 2 of keys and values."""
    result = search(space=changed(ONE, tensor_sizes=None))
    found = {write(one.options.mesh): one for one in result.tried}
    assert found["fsdp=-1,tensor=2"].is_planned and found["fsdp=-1,tensor=2"].mesh == {"fsdp": 4, "tensor": 2}
    for size, heads in ((4, 2), (8, 4)):
        refused = found[f"fsdp=-1,tensor={size}"]
        assert refused.outcome is Outcome.IMPOSSIBLE
        check_facts(refused.reason, f"size {heads}", "heads")
    assert len(found) == len(result.tried) == 4 and result.is_complete


def test_the_options_of_xla_are_chosen_for_the_mesh_that_won():
    def change(options, plan):
        plan.items_per_s *= 1 + ("tensor" in dict(options.mesh)) + bool(options.xla)

    result = search(space=changed(ONE, xla=None, tensor_sizes=(2,)), planner=changing(change))
    split = changed(TINY, mesh="fsdp=-1,tensor=2", batch_per_device=2)
    wanted = set(xla_choices(split, NODE)[2][1])
    assert wanted <= {pair for one in result.tried for pair in one.options.xla}
    assert wanted != set(xla_choices(TINY, NODE)[2][1])


def test_a_bound_gives_every_group_its_own_link():
    """Llama-3-8B in two groups of a node each: gathers and scatters stay inside, shards are summed between the two."""
    given = made(StepOptions, model="llama-8b", mesh="replica=-1,fsdp=8")
    parameters, root = 8_030_261_248, 1_050_677_248
    inside = 7 / 8 * 2 * (2 * parameters - root + parameters) / TWO_NODES.group_bandwidth(range(8), 2**30)
    between = 2 * parameters / 8 / TWO_NODES.group_bandwidth([0, 8], 2**30)
    bound = bound_job(given, TWO_NODES)
    assert bound.wire_s == pytest.approx(inside + between, rel=1e-3)
    assert bound.compute_s == pytest.approx(0.4795, rel=1e-3) and bound.items == 8192
    estimate = bound.to_dict(2**36)
    assert (estimate["wire_s"], estimate["compute_s"]) == (bound.wire_s, bound.compute_s)
    assert estimate["step_s_at_least"] == bound.compute_s and estimate["state_bytes"] == bound.state_bytes


def test_frozen_weights_need_no_gradient_and_no_reduction():
    """Two FLOPs less per frozen element and token; the bound knows that it may be more."""
    given = made(StepOptions, model="llama-8b")
    layers, head = 32 * (218_112_000 - 2 * 4096), 128256 * 4096

    def look(*frozen):
        options = changed(given, frozen=frozen)
        planned = shard_planned(options, num_devices=8)
        return planned.work.item_flops or 0.0, bound_job(options, NODE)

    flops, whole = look()
    part_flops, part = look("layers")
    assert flops - part_flops == 2 * layers
    assert look("embed")[0] == flops, "a lookup multiplies nothing"
    least = (flops / 3 + 2 * head) * 8192 / NODE.gpu.peak_flops("bfloat16")
    assert part.compute_s == pytest.approx(least) and part.compute_s < whole.compute_s
    assert look("embed")[1].compute_s == whole.compute_s
    norms = 65 * 4096
    reduced = 7 / 8 * 2 * (layers + 64 * 4096)
    assert whole.wire_bytes - part.wire_bytes == pytest.approx(reduced, rel=norms / layers)
    tied = made(StepOptions, model="gpt2", frozen=("wte",))
    planned = shard_planned(tied, num_devices=8)
    assert matmul_elements(planned.model.layout, 50257, trainable=False) == 50257 * 768
    rows = made(StepOptions, factory="examples.vit:job", frozen=("blocks",))
    planned = shard_planned(rows, num_devices=8)
    assert planned.work.item_flops is None and bound_job(rows, NODE).compute_s == 0


def test_this_xla_knows_every_choice():
    sharding = jax.sharding.SingleDeviceSharding(topology_devices(NODE)[0])
    double = jax.jit(lambda x: 2 * x, in_shardings=sharding, out_shardings=sharding)
    lowered = double.lower(jax.ShapeDtypeStruct((8,), jnp.float32))
    found = xla_choices(TINY, NODE)
    assert len(found) == 3
    for pairs in itertools.chain(*found):
        lowered.compile(compiler_options={name: x for name, x in pairs if x is not None})


@pytest.mark.proof
def test_real_plans_are_no_faster_than_their_bounds():
    space = changed(ONE, strategies=(), remats=("none",), beam=1)
    told = []
    result = search_job(TINY, NODE, space, on_progress=told.append)
    planned = [one for one in result.tried if one.is_planned]
    assert len(planned) == 2 and result.is_complete and result.best and (result.gain or 0) >= 1
    for one in planned:
        bound = bound_job(one.options, NODE)
        assert one.item_s >= bound.item_s and one.needed_bytes >= bound.state_bytes
    assert sum(text.startswith("compiling ") for text in told) == len(planned)


def test_the_best_is_tried_under_every_program_depth_and_storage():
    result = search(space=changed(SMALL, xla=()))
    tried = {(one.options.program, one.options.prefetch, one.options.storage) for one in result.tried}
    assert tried == {
        (None, None, "per_parameter"),
        ("xla", None, "per_parameter"),
        ("manual", 1, "per_parameter"),
        ("manual", 2, "per_parameter"),
        ("manual", 1, "flat"),
    }
