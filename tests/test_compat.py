"""What stands in compat.py is there in this JAX, means what it meant, and stays small."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec

import jfsdp
from jfsdp import compat
from jfsdp.engine.options import compiler_options
from jfsdp.jaxprs import unread
from jfsdp.plan import Cluster, find_gpu, topology_devices
from tests.models_small import Block, Tower, make_batches, token_loss
from tests.refusals import refuses
from tests.sharding import fully_shard


def test_it_is_small():
    assert len(inspect.getsource(compat).splitlines()) <= 200


def test_the_axes_of_a_shard_map_are_read():
    mesh = jfsdp.make_mesh(fsdp=4, tensor=2)
    split = jax.shard_map(
        lambda x: x * 2, mesh=mesh, in_specs=PartitionSpec("fsdp"), out_specs=PartitionSpec("fsdp"), axis_names={"fsdp"}
    )
    (eqn,) = [e for e in jax.make_jaxpr(split)(jnp.ones(8)).jaxpr.eqns if e.primitive.name == "shard_map"]
    assert compat.manual_axes(eqn) == {"fsdp"}


def test_few_steps_are_under_way_on_simulated_devices():
    """More than 32 hang for ever before JAX 0.12, with nothing of jfsdp's in the program."""
    model = fully_shard(Tower, units=[Block], min_size=20)
    tx, found = optax.sgd(1e-3), []
    step, state = model.train_step(token_loss, tx, check_loss=False), model.init(tx)
    batch = step.shard_batch(make_batches(1)[0])
    for _ in range(60):
        state, metrics = step(state, batch)
        found.append(metrics["loss"])
        if jax.__version_info__ < (0, 12):
            assert all(loss.is_ready() for loss in found[: -compat.MAX_RUNNING])


def test_xla_takes_the_options_of_this_version():
    """By the compiler itself: an unknown name is refused."""
    mesh = jfsdp.make_mesh(devices=topology_devices(Cluster(find_gpu("h100"))), fsdp=-1)
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("fsdp"))
    lowered = jax.jit(lambda x: x.sum()).lower(jax.ShapeDtypeStruct((64,), jnp.float32, sharding=sharding))
    options = compat.pipelining("all_gather", "all_reduce", "reduce_scatter")
    lowered.compile(compiler_options=compiler_options(mesh) | options)
    assert set(compat.pipelining("all_gather", is_on=False).values()) == {None}


def test_a_jaxpr_is_cut_and_run():
    closed = jax.make_jaxpr(lambda x, y: (x + 1, y * 2))(1.0, 2.0)
    cut, is_read = compat.dce_jaxpr(closed.jaxpr, [False, True])
    assert is_read == [False, True] and isinstance(closed, compat.ClosedJaxpr)
    assert compat.core.eval_jaxpr(cut, (), 3.0) == [6.0]
    assert isinstance(jax.make_jaxpr(lambda: 1.0)().jaxpr.outvars[0], compat.Literal)


def test_keys_of_an_implementation_of_ones_own_draw():
    from jfsdp.train.step.loss_check import same_bits

    keys = same_bits(jax.random.split(jax.random.key(0), 3))
    drawn = np.asarray(jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys))
    np.testing.assert_allclose(drawn, 0.25, atol=1e-3)


def test_processes_and_grain_are_found():
    np.testing.assert_array_equal(np.asarray(compat.gather_from_processes(np.arange(2))).reshape(-1), np.arange(2))
    names = ("ConcatThenSplitIterDataset", "WindowShuffleIterDataset", "ThreadPrefetchIterDataset", "batch_and_pad")
    assert all(hasattr(compat.grain_experimental(), name) for name in names)
    before = jax.config.jax_enable_compilation_cache
    with compat.using_cache(jax_enable_compilation_cache=not before):
        assert jax.config.jax_enable_compilation_cache is not before
    assert jax.config.jax_enable_compilation_cache is before


mystery = Primitive("mystery")
mystery.def_abstract_eval(lambda x, *, body: x)


def test_an_operation_with_an_unknown_body_is_not_taken_for_harmless():
    """What it does with rows nobody reads: so the global view computes it, and `manual` refuses it by name."""
    inner = jax.make_jaxpr(jnp.sin)(jnp.ones((2, 4)))
    assert unread(jax.make_jaxpr(lambda x: mystery.bind(x, body=inner))(jnp.ones((2, 4))).jaxpr) == ["mystery"]

    def loss(model, batch):
        out = model(batch["x"])
        out = mystery.bind(out, body=jax.make_jaxpr(jnp.sin)(out))
        return jfsdp.Loss(out.sum(), 1.0 * len(out))

    make = lambda rngs: nnx.Linear(4, 12, rngs=rngs)  # noqa: E731
    tx, batch = jfsdp.optim.track_ema(0.5), {"x": np.ones((16, 4), np.float32)}
    mesh = jfsdp.make_abstract_mesh({"fsdp": 8})
    model = fully_shard(make, mesh=mesh, min_size=0, shard_dim=lambda path, shape: len(shape) - 1)
    assert model.train_step(loss, tx, program="xla").resolve(batch)
    refuses(lambda: model.train_step(loss, tx).resolve(batch), "the model calls mystery", "program='xla'")
