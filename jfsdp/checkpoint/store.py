"""Write a state to a directory and read it back, through orbax: every process its own shards."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jfsdp.checkpoint.tree import check_matches, entries, make_manifest, rebuild
from jfsdp.train.state import TrainState, with_work
from jfsdp.train.storage import by_leaf, in_storage, shapes_by_leaf

STATE, MANIFEST = "state", "manifest"


def save(path: Any, state: TrainState, *, extra: Any = None) -> None:
    """Write one checkpoint and wait until it is complete. It appears at `path` whole or not at all.

    Layout:  each process writes the shards that it owns; names and logical shapes carry no mesh and no strategy.
    Memory:  one host copy of this process's shards; under flat storage a second copy of them on the devices too.

    Args:
      path: a directory that does not exist yet; a step directory of a run has the same form.
      extra: anything `json` writes; returned by `read_manifest`.

    Raises:
      ValueError: if `path` exists: nothing saved is ever overwritten.
      OSError: if the disk is full or not writable.
    """
    import orbax.checkpoint as ocp

    path = Path(path).absolute()
    if path.exists():
        raise ValueError(f"checkpoint {path}: exists already; choose another path, or remove it first")
    state = by_leaf(state)
    check_space(path, state)
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as writer, readable_errors(path):
        writer.save(path, save_args(state, extra))


def restore(path: Any, like: TrainState) -> TrainState:
    """Read a checkpoint into the layout of another state: any mesh, any strategy.

    Layout:  each process reads only the slices that its devices hold.
    Memory:  one host copy of this process's shards; into flat storage a second copy of them on the devices too.

    Args:
      path: what `save` wrote, or one step of a run.
      like: a state, or `model.abstract_state(tx)`; its arrays are not read.

    Raises:
      ValueError: if there is no checkpoint, or names, shapes or dtypes differ; lists them.
    """
    path = Path(path).absolute()
    mesh: Any = getattr(like.step.sharding, "mesh", None)
    if isinstance(mesh, jax.sharding.AbstractMesh):
        raise ValueError(f"checkpoint {path}: `like` stands on a mesh without devices; build the model on make_mesh()")
    manifest, shapes = read_manifest(path), shapes_by_leaf(like)
    check_matches(path, manifest, shapes)
    named = entries(shapes)
    arrays = _read_arrays(path / STATE, {name: entry.value for name, entry in named.items()})
    state = rebuild(shapes, arrays, {name: manifest["arrays"][name]["key_impl"] for name in named})
    return in_storage(with_work(state, shapes), like.layout)


def _read_arrays(path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in wanted.items()}
    # Not strict: padding differs from layout to layout; logical shapes were compared before ([Note: what a
    # checkpoint holds]).
    how = {
        name: ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=tuple(x.shape), dtype=x.dtype, strict=False)
        for name, x in shapes.items()
    }
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            return reader.restore(path, ocp.args.PyTreeRestore(shapes, restore_args=how))
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"checkpoint {path.parent}: its arrays cannot be read: {error}") from error


def read_manifest(path: Any) -> dict[str, Any]:
    """Read what a checkpoint says about itself: arrays, layout, and the caller's extra.

    Raises:
      ValueError: if the directory is no complete checkpoint.
    """
    file = Path(path) / MANIFEST / "metadata"
    if not file.is_file():
        raise ValueError(
            f"checkpoint {path}: there is none (no {MANIFEST}); pass the path given to save, or a step of a run"
        )
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"checkpoint {path}: its manifest is damaged ({error}); restore another step") from error


def save_args(state: TrainState, extra: Any) -> Any:
    """Return what orbax is to write: arrays by name, and the manifest."""
    import orbax.checkpoint as ocp

    arrays = {name: entry.value for name, entry in entries(state).items()}
    manifest = make_manifest(state, extra)
    try:
        json.dumps(manifest)
    except (TypeError, ValueError) as error:
        raise ValueError(f"extra: {error}; what goes beside a state must be plain JSON") from error
    return ocp.args.Composite(**{STATE: ocp.args.PyTreeSave(arrays), MANIFEST: ocp.args.JsonSave(manifest)})


def check_space(path: Path, state: TrainState) -> None:
    """Refuse to begin a save that the disk cannot hold.

    Raises:
      OSError: naming the bytes needed and free.
    """
    parent = next(p for p in [path, *path.parents] if p.exists())
    needed = sum(_owned_bytes(entry.value) for entry in entries(state).values())
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"checkpoint needs about {needed:,} bytes, {free:,} are free; earlier ones are untouched",
            str(path),
        )


def _owned_bytes(array: jax.Array) -> int:
    """Return what this process writes of an array: each shard once, whoever else holds a copy of it."""
    return sum(shard.data.nbytes for shard in array.addressable_shards if shard.replica_id == 0)


@contextlib.contextmanager
def readable_errors(path: Any) -> Iterator[None]:
    """Turn what storage libraries raise for a full or unwritable disk into an OSError that says what still stands."""
    try:
        yield
    except Exception as error:
        for code, phrases in _DISK_ERRORS.items():
            if getattr(error, "errno", None) == code or any(phrase in str(error) for phrase in phrases):
                reason = f"checkpoint was not written ({phrases[0]}); earlier checkpoints are untouched"
                raise OSError(code, reason, str(path)) from error
        raise


_DISK_ERRORS: dict[int, tuple[str, ...]] = {
    errno.ENOSPC: ("No space left on device", "ENOSPC", "RESOURCE_EXHAUSTED"),
    errno.EACCES: ("Permission denied", "PERMISSION_DENIED"),
    errno.EROFS: ("Read-only file system",),
    errno.EDQUOT: ("Disk quota exceeded",),
}
