"""What each of several processes does with checkpoints, and says of it; called through `tests.processes`."""

import contextlib
import errno
import functools
import time
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

import jfsdp
from jfsdp.checkpoint.disk import commit, digest, pieces, writer
from jfsdp.checkpoint.disk.files import DamagedError
from jfsdp.checkpoint.disk.logical_arrays import logical_arrays
from jfsdp.checkpoint.disk.reader import CheckpointSource
from jfsdp.checkpoint.manager import Checkpointer
from jfsdp.checkpoint.objects.writer import ObjectWriter
from tests.checkpoint.elastic import bits
from tests.steps import fully_shard

TX = optax.adam(1e-3)


class Net(nnx.Module):
    """Matrices of some size, a vector and a matrix that divide by nothing, and keys."""

    def __init__(self, rngs):
        self.large = nnx.Param(jax.random.normal(rngs.params(), (128, 64)))
        self.wide = nnx.Param(jax.random.normal(rngs.params(), (32, 96)))
        self.odd = nnx.Param(jax.random.normal(rngs.params(), (13, 11)))
        self.bias = nnx.Param(jax.random.normal(rngs.params(), (7,)))
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


@functools.cache
def model(strategy: str, storage: str) -> jfsdp.ShardedModel:
    engine: dict[str, Any] = {"program": "manual", "storage": storage} if storage == "flat" else {}
    mesh = jfsdp.make_mesh(replica=2 if strategy == "HYBRID_SHARD" else 1)
    return fully_shard(Net, mesh=mesh, strategy=strategy, min_size=8, **engine)


@functools.cache
def first_state(strategy: str, storage: str) -> jfsdp.TrainState:
    return model(strategy, storage).init(TX)


def state_of(strategy: str, storage: str = "per_parameter", step: int = 0) -> jfsdp.TrainState:
    """Return a state of other parameters and another count at each step."""
    state = first_state(strategy, storage)
    change = lambda x: x + (step + 1) if x.ndim == 0 else x * (step + 2)  # noqa: E731
    params, moments = jax.tree.map(change, (state.params, state.opt_state))
    return jfsdp.TrainState(**{**vars(state), "params": params, "opt_state": moments})


def bounds(index) -> list[list[int]]:
    return [[part.start, part.stop] for part in index]


def save(strategy, storage, path):
    """Save; return the shapes of all arrays, the parts of them that this process wrote, and the files it hashed."""
    state, copied, hashed = state_of(strategy, storage), [], []
    copy, hash_files = pieces.copy_pieces, commit.hash_files
    with (
        mock.patch.object(pieces, "copy_pieces", lambda state: copied.append(copy(state)) or copied[-1]),
        mock.patch.object(commit, "hash_files", lambda path, names: hashed.extend(names) or hash_files(path, names)),
    ):
        jfsdp.checkpoint.save(path, state, extra={"process": jax.process_index()})
    (written,) = copied
    return {
        "shapes": {name: array.shape for name, array in logical_arrays(state).items()},
        "parts": [[name, bounds(index)] for name, piece in written.items() for index, _ in piece.parts],
        "bytes": sum(data.nbytes for piece in written.values() for _, data in piece.parts),
        "hashed": hashed,
        "bits": bits(state),
    }


@contextlib.contextmanager
def counted_reads():
    """List what is read of a checkpoint: names, and which slices."""
    found, read = [], CheckpointSource.read

    def counted(self, name, index):
        found.append([name, bounds(index)])
        return read(self, name, index)

    with mock.patch.object(CheckpointSource, "read", counted):
        yield found


def restore(strategy, storage, path, one_replica):
    """Restore; return what this process read, and what came of it."""
    like = model(strategy, storage).abstract_state(TX)
    with counted_reads() as reads:
        state = jfsdp.checkpoint.restore(path, like=like, one_replica=one_replica)
    return {"reads": reads, "bits": bits(state)}


@functools.cache
def run(directory) -> Checkpointer:
    return Checkpointer(directory)


def save_step(directory, step, failing=None):
    """Save a step of a run; in one of the processes the disk is full at a given place."""
    state = state_of("full_shard", step=step)
    with failure(failing if failing and failing[0] == jax.process_index() else None):
        run(directory).save(step, state, {"process": jax.process_index(), "step": step})
        run(directory).wait()
    return run(directory).steps()


def save_unwritable_extra(path):
    """Save; what one of the processes gives beside the state is no JSON."""
    jfsdp.checkpoint.save(path, state_of("full_shard"), extra={jax.process_index()} if jax.process_index() else 0)


def failure(where):
    if where is None:
        return contextlib.nullcontext()
    targets = {
        "write": (writer.ts, "open"),
        "hash": (writer, "hash_local_files"),
        "merge": (ocp.PyTreeCheckpointHandler, "finalize"),
        "commit": (commit, "write_digests"),
    }
    full = OSError(errno.ENOSPC, "No space left on device")
    return mock.patch.object(*targets[where[1]], side_effect=full)


def restore_step(directory, fall_back):
    state, extra = run(directory).restore(state_of("full_shard"), fall_back=fall_back)
    return {"step": run(directory).steps(), "extra": extra, "bits": bits(state)}


def restore_unreadable(directory, place, index, step, fall_back=False):
    """Restore the newest step, of which one process cannot open or read something."""
    if jax.process_index() != index:
        return restore_step(directory, fall_back)["extra"]
    targets = {"documents": "__init__", "digests": "check", "array": "read"}
    original = getattr(CheckpointSource, targets[place])

    def fail(self, *args, **options):
        path = args[0] if place == "documents" else self.path
        if str(path).endswith(f"/{step}"):
            raise DamagedError("not here")
        return original(self, *args, **options)

    if place == "digests":
        with mock.patch.object(digest, "find_damage", side_effect=DamagedError("not here")):
            return restore_step(directory, fall_back)["extra"]
    with mock.patch.object(CheckpointSource, targets[place], fail):
        return restore_step(directory, fall_back)["extra"]


def save_without_memory(directory, step):
    """Save a step of which one process cannot hold a copy."""
    lacking = mock.patch.object(pieces, "copy_pieces", side_effect=MemoryError("no memory"))
    with lacking if jax.process_index() else contextlib.nullcontext():
        run(directory).save(step, state_of("full_shard"))


def leave_alone(directory, step):
    """Save a step; then one process ends with an error, of which the other learns nothing."""
    own = Checkpointer(directory)
    own.save(step, state_of("full_shard", step=step), {"step": step})
    if jax.process_index():
        own.close(alone=True)
        return []
    while not own.steps():
        time.sleep(0.01)
    own.close(alone=True)
    return own.steps()


def bits_of(step):
    return bits(state_of("full_shard", step=step))


def num_elements(parts) -> int:
    return sum(int(np.prod([stop - start for start, stop in index])) for _, index in parts)


def _snapshots(directory, num_hosts):
    """Return the snapshots of this process; with two hosts each has a directory of its own, as hosts have."""
    from jfsdp.checkpoint.snapshot import Snapshots
    from jfsdp.launch import hosts

    hosts._first_processes.cache_clear()
    hosts.host_id = lambda: f"host {jax.process_index() % num_hosts}"
    return Snapshots(f"{directory}/{jax.process_index() % num_hosts}", "run")


@functools.cache
def _state(strategy):
    from tests.checkpoint.test_store import TX, Net

    sizes: dict[str, Any] = {"replica": 2, "fsdp": 2} if strategy == "HYBRID_SHARD" else {"fsdp": 4}
    model = fully_shard(Net, mesh=jfsdp.make_mesh(**sizes), strategy=strategy, min_size=8)
    return model.init(TX, seed=3), model.abstract_state(TX)


def snapshot(directory, num_hosts, strategy):
    snapshots = _snapshots(directory, num_hosts)
    state, like = _state(strategy)
    for step in (1, 2):
        snapshots.take(step, state, {"of": jax.process_index()})
    snapshots.wait()
    newest = snapshots.newest(like)
    assert newest is not None
    again, extras = snapshots.restore(like, newest)
    same = list(map(_own_bits, jax.tree.leaves(state))) == list(map(_own_bits, jax.tree.leaves(again)))
    size = (snapshots.directory / "2" / str(jax.process_index())).stat().st_size
    return {"newest": newest, "same": same, "extras": extras, "bytes": size}


def newest_without_file(directory, strategy):
    """Return what is found once the file of process 1 is gone."""
    import pathlib

    from jfsdp.launch.hosts import wait_for_all

    for path in pathlib.Path(directory).glob("*/2/1"):
        path.unlink(missing_ok=True)
    wait_for_all("removed")
    num_hosts = len(list(pathlib.Path(directory).iterdir()))
    return _snapshots(directory, num_hosts).newest(_state(strategy)[1])


def _own_bits(array):
    is_key = jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key)
    data = jax.random.key_data(array) if is_key else array
    return [np.asarray(shard.data).tobytes() for shard in data.addressable_shards]


def newest_of_two_starts(directory):
    """Take a step in two starts, and put the file of process 1 back as the first left it."""
    import pathlib

    from jfsdp.launch.hosts import wait_for_all

    state, like = _state("full_shard")
    path, kept = pathlib.Path(directory) / "0" / "2" / "1", b""
    for _ in range(2):
        snapshots = _snapshots(directory, 1)
        snapshots.take(2, state, None)
        snapshots.wait()
        kept = kept or path.read_bytes()
        wait_for_all("taken")
    if jax.process_index() == 1:
        path.write_bytes(kept)
    wait_for_all("put back")
    return _snapshots(directory, 1).newest(like)


def read_back(path):
    """Restore a checkpoint; return "equal" if it is what `save` wrote of full_shard."""
    found = jfsdp.checkpoint.restore(path, model("HYBRID_SHARD", "per_parameter").abstract_state(TX))
    wrote = jfsdp.checkpoint.restore(path, model("full_shard", "per_parameter").abstract_state(TX))
    return "equal" if bits(found) == bits(wrote) == bits(state_of("full_shard")) else "differs"


def fail_to_upload(path):
    """Save; process 1 cannot send its packs. Return the error."""

    def fail(*_):
        raise OSError(errno.EIO, "told to fail")

    patch = mock.patch.object(ObjectWriter, "_send_pack", fail) if jax.process_index() else contextlib.nullcontext()
    with patch:
        try:
            jfsdp.checkpoint.save(path, state_of("full_shard"))
        except OSError as error:
            return str(error)
