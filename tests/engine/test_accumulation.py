"""What each way of accumulating, hpZ, frozen leaves and offload put on the wire and in memory, by formula.

Llama-3-8B's dims with two layers on 64 H100 that are not there; 4 microbatches. Bytes per device and step; the scales
of norms travel in float32 and are 0.01 % of it.
"""

import functools
from typing import Any

import pytest

import jfsdp
from jfsdp.layout.layout import num_parameters
from jfsdp.trainer.job import find_job
from tests import hlo
from tests.thin import thin

NUM, GROUP, MICROBATCHES, SEQ_LEN = 64, 8, 4, 512
GROUPS: dict[str, Any] = {"replica": NUM // GROUP, "fsdp": GROUP}
SHARE, GROUP_SHARE = (NUM - 1) / NUM, (GROUP - 1) / GROUP


@functools.cache
def build(strategy="full_shard", hybrid=False, frozen=None, offload=None):
    job = find_job("llama-8b").with_config(num_layers=2, attention="cudnn")
    model = jfsdp.fully_shard(
        job.model,
        mesh=jfsdp.make_mesh(devices=hlo.h100s(NUM // 8), **(GROUPS if hybrid else {})),
        strategy=strategy,
        units=job.units,
        mp_policy=jfsdp.MixedPrecisionPolicy("bfloat16"),
        frozen=frozen,
        offload_policy=offload and jfsdp.OffloadPolicy(**dict.fromkeys(offload.split(","), True)),
    )
    return job, model


def compile_step(step_options=(), microbatches=MICROBATCHES, **options):
    job, model = build(**options)
    tx = job.optimizer(3e-4)
    step = model.train_step(job.loss, tx, accumulate=microbatches, max_grad_norm=1.0, **dict(step_options))
    batch = job.batch(NUM * microbatches, SEQ_LEN)
    return model, step.lower(model.abstract_state(tx), batch).compile()


@functools.cache
def wire(**options):
    """Return bytes by (kind, devices in a group), and the layout."""
    model, compiled = compile_step(**options)
    total = {}
    for item in hlo.collectives(compiled.as_text(), NUM):
        key = item.kind, item.group_size
        total[key] = total.get(key, 0) + item.count * item.wire_bytes
    return {key: size for key, size in total.items() if size > 1e5}, model.layout


def counts(layout):
    root = [leaf for leaf in layout.leaves if leaf.unit == ""]
    return num_parameters(layout.leaves), num_parameters(root)


def expect(found, wanted):
    assert found == pytest.approx(wanted, rel=1e-3), {key: found.get(key, 0) / wanted.get(key, 1) for key in found}


GATHERED = (("reshard_after_backward", False),)
ONCE = (("sync", "last"),)


@pytest.mark.proof  # of groups it is tested below
def test_every_microbatch_gathers_and_scatters():
    found, layout = wire()
    total, root = counts(layout)
    gathers, scatters = 2 * (2 * total - root) * SHARE, 2 * total * SHARE
    expect(found, {("all-gather", NUM): MICROBATCHES * gathers, ("reduce-scatter", NUM): MICROBATCHES * scatters})


@pytest.mark.proof
def test_parameters_kept_over_microbatches_are_gathered_once_a_step():
    found, layout = wire(step_options=GATHERED)
    size = 2 * counts(layout)[0] * SHARE
    expect(found, {("all-gather", NUM): size, ("reduce-scatter", NUM): MICROBATCHES * size})


@pytest.mark.parametrize(("strategy", "options"), thin([("zero1", ()), ("full_shard", GATHERED + ONCE)]))
def test_reducing_once_scatters_once_a_step(strategy, options):
    found, layout = wire(strategy=strategy, step_options=options)
    size = 2 * counts(layout)[0] * SHARE
    expect(found, {("all-gather", NUM): size, ("reduce-scatter", NUM): size})


@pytest.mark.proof  # tests/plan/test_ledger.py has microbatches over groups, of a smaller model
@pytest.mark.parametrize("microbatches", [MICROBATCHES, 1])
def test_hybrid_reduces_in_the_group_each_time_and_between_groups_once(microbatches):
    found, layout = wire(hybrid=True, microbatches=microbatches)
    total, root = counts(layout)
    expect(
        found,
        {
            ("all-gather", GROUP): microbatches * 2 * (2 * total - root) * GROUP_SHARE,
            ("reduce-scatter", GROUP): microbatches * 2 * total * GROUP_SHARE,
            ("all-reduce", NUM // GROUP): 2 * GROUP_SHARE * 2 * total / GROUP,
        },
    )


@pytest.mark.proof
def test_node_gathers_over_all_forward_and_inside_the_host_backward():
    found, layout = wire(strategy="zeropp", microbatches=1)
    total, root = counts(layout)
    expect(
        found,
        {
            ("all-gather", NUM): 2 * total * SHARE,
            ("all-gather", GROUP): 2 * (total - root) * GROUP_SHARE,
            ("reduce-scatter", NUM): 2 * total * SHARE,
        },
    )


@pytest.mark.proof
def test_frozen_leaves_are_gathered_and_never_reduced():
    found, layout = wire(frozen="layers.mlp", microbatches=1)
    total, root = counts(layout)
    trained = num_parameters([leaf for leaf in layout.leaves if leaf.trainable])
    assert trained < 0.9 * total
    gathers, scatters = 2 * (2 * total - root) * SHARE, 2 * trained * SHARE
    expect(found, {("all-gather", NUM): gathers, ("reduce-scatter", NUM): scatters})


@pytest.mark.proof
def test_offloaded_optimizer_states_are_host_arguments_and_copied_back_once():
    """Of 12 P/N bytes of state 8 leave the device, for 8 P/N bytes over PCIe each way; temporaries stay as they were.

    On the way in nothing is copied: the kernels of the update read the host's buffers themselves.
    Offloaded parameters are not read from here: on the devices of a topology JAX drops the memory from shardings, and
    takes arguments that are not donated to be on the device.
    """
    model, compiled = compile_step(offload="opt_state", microbatches=1)
    moments = 8 * num_parameters(model.layout.leaves) / NUM
    memory = compiled.memory_analysis()
    assert memory.host_argument_size_in_bytes == pytest.approx(moments, rel=1e-3)
    assert memory.argument_size_in_bytes == pytest.approx(moments / 2, rel=1e-3)
    assert hlo.host_copies(compiled.as_text()) == pytest.approx((0, moments), rel=1e-3)
    _, on_device = compile_step(microbatches=1)
    assert memory.temp_size_in_bytes == pytest.approx(on_device.memory_analysis().temp_size_in_bytes, rel=0.01)


@pytest.mark.proof
def test_offloaded_gradients_wait_on_the_host():
    _, on_device = compile_step()
    model, compiled = compile_step(offload="grads")
    accumulators = 4 * num_parameters(model.layout.leaves) / NUM
    assert on_device.memory_analysis().host_temp_size_in_bytes == 0
    assert compiled.memory_analysis().host_temp_size_in_bytes == pytest.approx(accumulators, rel=0.01)
