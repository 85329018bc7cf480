"""Write a state to a directory and read it back: every process its own shards."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jfsdp.arguments import PathLike, checked
from jfsdp.checkpoint.disk.errors import check_open_files, check_path, check_space, readable_errors
from jfsdp.checkpoint.disk.files import CONFIG, EXTRA, LAYOUT, MANIFEST, UNFINISHED, bytes_below, make_manifest
from jfsdp.checkpoint.disk.lock import Lock
from jfsdp.checkpoint.disk.logical_arrays import contents, logical_arrays, rebuild
from jfsdp.checkpoint.disk.paths import local_path
from jfsdp.checkpoint.disk.processes import in_all, only_first, together
from jfsdp.checkpoint.disk.reader import CheckpointSource
from jfsdp.checkpoint.frozen import check_base, frozen_digests, without_frozen
from jfsdp.checkpoint.layers import OtherLayers
from jfsdp.checkpoint.source import Source, subset, total_bytes
from jfsdp.checkpoint.to_devices import place
from jfsdp.layout.lora import A, Adapter
from jfsdp.layout.report import differing_frozen, layout_to_dict, list_differences
from jfsdp.layout.select import select_leaves
from jfsdp.train.state import TrainState, with_work


@checked
def save(path: PathLike, state: TrainState, *, extra: Any = None, config: Any = None, frozen: bool = True) -> None:
    """Write one checkpoint and wait until it is complete. It appears at `path` whole or not at all.

    Layout:  each process writes what it owns, each part once; names and logical shapes carry no mesh, no strategy and
             no storage form. Nothing is gathered, and nothing copied on the devices.
    Memory:  one host copy of what this process writes.

    Args:
      path: a directory that does not exist yet; a step directory of a run has the same form.
      extra: anything `json` writes, of this process; returned by `read_manifest`, in a list by process.
      config: anything `json` writes; stands beside the arrays, to read.
      frozen: False leaves out the leaves that are not trained; see [Note: the base of a checkpoint] in frozen.py.

    Raises:
      ValueError: if `path` exists: nothing saved is ever overwritten.
      OSError: if the disk is full or not writable.
    """
    from jfsdp.checkpoint.disk.writer import Writer

    path = local_path(path)
    with contextlib.ExitStack() as stack:
        only_first(lambda: stack.enter_context(claimed(path)))
        writer = stack.enter_context(contextlib.closing(Writer()))
        start_save(writer, path, state, extra, config, None, frozen=frozen)
        with readable_errors(path, bytes_of(state)):
            wait_for(writer)


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Be the only one who writes a checkpoint, at a path where nothing is yet."""
    check_path(path)
    check_free(path)
    with readable_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f"{path.name}{UNFINISHED}.lock")
        lock = Lock(lock, f"checkpoint {path}: is being written by", "or choose another path")
    try:
        check_free(path)
        yield
    finally:
        lock.release()


def check_free(path: Path) -> None:
    """Refuse to write where something is already."""
    if path.exists():
        raise ValueError(f"checkpoint {path}: exists already; choose another path, or remove it first")


def unfinished(path: Path) -> Path:
    """Return the directory that a checkpoint is written into, until it is complete."""
    return path.with_name(path.name + UNFINISHED)


def make_room(path: Path, needed: int) -> None:
    """Make the directory that a checkpoint of so many bytes is written into; an unfinished one is removed.

    The caller has claimed the path.
    """
    check_space(path, needed - bytes_below(unfinished(path)))  # which makes way
    with readable_errors(path, needed):
        shutil.rmtree(unfinished(path), ignore_errors=True)
        unfinished(path).mkdir()


def start_save(
    writer: Any,
    path: Path,
    state: TrainState,
    extra: Any,
    config: Any,
    metrics: Mapping[str, float] | None,
    *,
    frozen: bool,
    on_commit: Callable[[], Any] = lambda: None,
) -> None:
    """Copy a state to the host and begin to write it. Every process calls this; see `Checkpointer.save`."""
    from jfsdp.checkpoint.disk.pieces import check_dtypes, copy_pieces

    if not isinstance(state, TrainState) or not isinstance(state.step, jax.Array):
        kind = "a state without arrays" if isinstance(state, TrainState) else f"a {type(state).__name__}"
        raise TypeError(f"checkpoint {path}: `state` is {kind}; pass what model.init(tx) or a train step returned")
    if state.step.is_deleted():
        raise ValueError(f"checkpoint {path}: a step took the arrays of `state`; save the state that it returned")
    base = None
    if not frozen:
        state, base = without_frozen(state), frozen_digests(state)
    arrays = logical_arrays(state)
    check_dtypes(arrays)
    given = together(lambda: (extra, _check_beside(extra, config, metrics or {})))
    manifest = make_manifest(arrays, path.name, step=int(state.step), metrics=given[0][1], base=base)
    documents = {MANIFEST: manifest, LAYOUT: layout_to_dict(state.layout), CONFIG: config}
    documents[EXTRA] = [extra for extra, _ in given]
    needed, partial = total_bytes(arrays.values()), unfinished(path)
    only_first(lambda: make_room(path, needed))
    in_all(lambda: check_open_files(path))
    pieces = in_all(lambda: copy_pieces(state))  # orbax would wait long for a process that cannot hold its copy
    with readable_errors(path, needed):
        writer.start(partial, path, pieces, documents, on_commit)


def wait_for(writer: Any) -> None:
    """Wait until what a writer writes is complete in every process; raises what went wrong with it.

    What is half written is removed then: where a disk was full, the next save needs the room.
    """
    try:
        if not all(together(writer.wait)):
            raise OSError(errno.EIO, "a process did not write its part of the checkpoint; earlier ones are untouched")
    except Exception:
        writer.remove_unfinished()
        raise


def bytes_of(state: TrainState) -> int:
    """Return the bytes of a checkpoint of a state, over all processes."""
    return total_bytes(logical_arrays(state).values())


def _check_beside(extra: Any, config: Any, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Check that the documents next to a state are plain JSON; return metrics as numbers."""
    for name, value in (("extra", extra), ("config", config)):
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: {error}; documents next to a state must be plain JSON") from error
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"metrics: {name!r} is {value!r}; give a number, or a scalar array") from error
    return numbers


@checked
def restore(
    path: PathLike,
    like: TrainState,
    *,
    only: str | Sequence[str] | None = None,
    skip: str | Sequence[str] | None = None,
    one_replica: bool = False,
) -> TrainState:
    """Read a checkpoint into another state: any mesh, strategy, engine and storage, layers stacked or listed.

    The files that are read are checked against their digests before; the processes share that work.

    Layout:  each process reads only the slices that its devices hold, in chunks of at most about 16 MiB.
    Cost:    no communication, but where `one_replica` says so.
    Memory:  on the host, twice the blocks that are read at once: 1 GiB, or one device's block of the largest array if
             that is larger; and 256 MiB of chunks. `jfsdp.checkpoint.to_devices.peak_bytes` gives the number.

    Args:
      path: what `save` wrote, or one step of a run.
      like: a state, or `model.abstract_state(tx)`; its arrays are not read, but for those that `only` and `skip`, or a
        checkpoint without frozen leaves, leave as they are, which it must then hold.
      only, skip: read arrays whose names match these globs, or a name above them, and no others: `only="params"` drops
        the optimizer's state of the checkpoint, `skip="params.lm_head"` leaves a new head new.
      one_replica: where several devices hold the same block (replicas, ddp), the first of them alone reads
        it and sends it to the others, by an all-reduce: for a file system that is slower than the network.

    Raises:
      ValueError: if there is no checkpoint, files are damaged (names them), or names, shapes or dtypes differ (lists
        them); if it has no frozen leaves, and those of `like` are others than it was trained on.
    """
    mesh: Any = getattr(like.step.sharding, "mesh", None)
    if isinstance(mesh, jax.sharding.AbstractMesh):
        raise ValueError(f"checkpoint {path}: `like` stands on a mesh without devices; build the model on make_mesh()")
    if (only is not None or skip is not None) and not isinstance(like.step, jax.Array):
        raise ValueError(f"checkpoint {path}: only= and skip= leave arrays as they are; pass a live state as `like`")
    source, view, wanted = in_all(lambda: _open(path, like, only, skip))
    if base := source.manifest.get("base"):
        check_base(path, base, like)
    source.check({name for want in wanted for name in view.sources(want)})
    return fill(like, view, wanted, one_replica=one_replica)


def _open(path: Any, like: TrainState, only: Any, skip: Any) -> tuple[CheckpointSource, OtherLayers, list[str]]:
    """Open a checkpoint; return it, the same under the names of `like`, and the names to read.

    Raises:
      ValueError: where it holds other names, logical shapes or dtypes than are requested; lists them.
    """
    source, requested = CheckpointSource(path), logical_arrays(like)
    base = {f"params.{name}" for name in source.manifest.get("base", ())}
    wanted = [name for name in choose(requested, only, skip) if name not in base]
    if not wanted:
        raise ValueError(f"checkpoint {path}: holds no frozen leaves, and only= and skip= choose no others")
    view = OtherLayers(source, {name: requested[name] for name in wanted})
    whole, impls = only is None and skip is None, source.key_impls
    there = {name: _show(array, impls.get(name)) for name, array in view.arrays.items() if whole or name in wanted}
    ours = {name: _show(requested[name], requested[name].key_impl) for name in wanted}
    if lines := list_differences(there, ours):
        stored = (source.manifest["layout"] or {}).get("leaves", ())
        trainable = {leaf["path"]: leaf["trainable"] for leaf in stored}
        frozen = whole and differing_frozen(trainable, {x.path: x.trainable for x in like.layout.leaves})
        remedy = frozen or (
            "build the model and the optimizer as they were saved (`jfsdp checkpoint inspect` shows them), or read "
            "what fits into a live state: only=, skip="
        )
        raise ValueError(f"checkpoint {path} is of another model or optimizer:\n{lines}\n  {remedy}")
    _check_scales(source, like, wanted)
    return source, view, wanted


def fill(like: TrainState, source: Source, wanted: Collection[str], *, one_replica: bool = False) -> TrainState:
    """Return a state with some of its arrays read from a source, and the others as they are in `like`.

    Layout, Cost, Memory: as `restore`.
    """
    arrays = contents(like)
    read = [stored for stored in arrays if stored.name in wanted]
    placed = place(read, subset(source, wanted), one_replica=one_replica)
    found: dict[str, Any] = {stored.name: array for stored, array in zip(read, placed, strict=True)}
    return with_work(rebuild(like, [found.get(stored.name, stored.value) for stored in arrays]), like)


def choose(arrays: Mapping[str, Any], only: Any, skip: Any) -> list[str]:
    """Return the names that `only` chooses and `skip` does not.

    Raises:
      ValueError: if a pattern matches nothing, or nothing is left.
    """
    chosen = arrays if only is None else select_leaves("only", only, arrays, {})
    skipped = select_leaves("skip", skip, arrays, {})
    remaining = [name for name in arrays if name in chosen and name not in skipped]
    if not remaining:
        raise ValueError(f"only={only!r} and skip={skip!r} leave nothing to read; widen one of them")
    return remaining


def _check_scales(source: CheckpointSource, like: TrainState, wanted: Collection[str]) -> None:
    """Refuse adapters that are multiplied by another number than when they were trained."""
    stated = (source.manifest["layout"] or {}).get("adapters", ())
    there, read = {one["path"]: Adapter.from_dict(one) for one in stated}, {*wanted}
    for ours in like.layout.adapters:
        theirs = there.get(ours.path, ours)
        if theirs.scale != ours.scale and f"params.{ours.name(A)}" in read:
            raise ValueError(
                f"checkpoint {source.path}: has the adapter [{theirs.describe()}], scale {theirs.scale:g}, and the "
                f"model [{ours.describe()}], scale {ours.scale:g}; give fully_shard the alpha that it was trained with"
            )


def _show(array: Any, key_impl: str | None) -> str:
    keys = f" of {key_impl} keys" if key_impl else ""
    return f"{jax.numpy.dtype(array.dtype).name}{list(array.shape)}{keys}"
