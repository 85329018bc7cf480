"""Saving a state to a directory and restoring it. Every process writes and reads its own shards."""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax

from jfsdp.arguments import PathLike, checked
from jfsdp.checkpoint.disk import place as on_disk
from jfsdp.checkpoint.disk.files import CONFIG, EXTRA, LAYOUT, MANIFEST, make_manifest
from jfsdp.checkpoint.disk.logical_arrays import contents, logical_arrays, rebuild
from jfsdp.checkpoint.disk.paths import absolute_path
from jfsdp.checkpoint.disk.processes import in_all, together
from jfsdp.checkpoint.disk.reader import CheckpointSource
from jfsdp.checkpoint.frozen import check_base, frozen_digests, without_frozen
from jfsdp.checkpoint.layers import ConvertedLayers
from jfsdp.checkpoint.objects.reader import open_checkpoint
from jfsdp.checkpoint.source import Source, subset, total_bytes
from jfsdp.checkpoint.to_devices import place
from jfsdp.checkpoint.writer import Writer
from jfsdp.layout.lora import A, Adapter
from jfsdp.layout.report import differing_frozen, layout_to_dict, list_differences
from jfsdp.layout.select import select_leaves
from jfsdp.objects.path import ObjectPath
from jfsdp.train.state import TrainState, with_work


@checked
def save(path: PathLike, state: TrainState, *, extra: Any = None, config: Any = None, frozen: bool = True) -> None:
    """Write one checkpoint and wait until it is complete. It appears at `path` completely or not at all.

    Layout:  each process writes its own pieces, each part once; names and logical shapes do not depend on mesh,
             strategy or storage form. Nothing is gathered or copied on the devices.
    Memory:  one host copy of the pieces of this process.

    Args:
      path: a new directory; step directories of a run have the same form.
      extra: JSON data of this process; `read_manifest` returns it in a list by process.
      config: JSON data saved for human readers.
      frozen: False omits leaves that are not trained; see [Note: the base of a checkpoint] in frozen.py.

    Raises:
      ValueError: if `path` exists; checkpoints are never overwritten.
      OSError: if the disk is full or not writable.
    """
    path = absolute_path(path)
    with open_writer(path) as writer:
        start_save(writer, path, state, extra, config, None, frozen=frozen)
        wait_for(writer)


def place_of(path: Any) -> ModuleType:
    """Return the functions for directories of checkpoints where this path is."""
    if isinstance(path, ObjectPath):
        from jfsdp.checkpoint.objects import place as in_store

        return in_store
    return on_disk


@contextlib.contextmanager
def open_writer(path: Any) -> Iterator[Writer]:
    """Lock a new checkpoint path in process 0, so that only this run writes to it, and open its writer.

    After an error, an unfinished checkpoint is removed.
    """
    place = place_of(path)

    def check() -> None:
        if not place.is_free(path):
            raise ValueError(f"checkpoint {path}: already exists; choose another path, or remove it first")

    def lock() -> Any:
        check()
        held = place.lock_path(path)
        stack.callback(held.release)
        check()
        return held

    with contextlib.ExitStack() as stack:
        held = in_all(lambda: lock() if jax.process_index() == 0 else None)
        writer = stack.enter_context(contextlib.closing(place.make_writer(held)))
        try:
            yield writer
        except BaseException:
            writer.remove_unfinished()
            raise


def start_save(
    writer: Writer,
    path: Any,
    state: TrainState,
    extra: Any,
    config: Any,
    metrics: Mapping[str, float] | None,
    *,
    frozen: bool,
    on_commit: Callable[[], Any] = lambda: None,
) -> None:
    """Copy a state to the host and begin to write it. Every process must call this; see `Checkpointer.save`."""
    from jfsdp.checkpoint.disk.pieces import check_dtypes, copy_pieces

    if not isinstance(state, TrainState) or not isinstance(state.step, jax.Array):
        kind = "a state without arrays" if isinstance(state, TrainState) else f"a {type(state).__name__}"
        raise TypeError(f"checkpoint {path}: `state` is {kind}; pass the state that model.init(tx) or a step returned")
    if state.step.is_deleted():
        raise ValueError(f"checkpoint {path}: `state` was donated to a step; save the state that it returned")
    base = None
    if not frozen:
        state, base = without_frozen(state), frozen_digests(state)
    arrays = logical_arrays(state)
    check_dtypes(arrays)
    given = together(lambda: (extra, _check_documents(extra, config, metrics or {})))
    manifest = make_manifest(arrays, path.name, step=int(state.step), metrics=given[0][1], base=base)
    documents = {MANIFEST: manifest, LAYOUT: layout_to_dict(state.layout), CONFIG: config}
    documents[EXTRA] = [extra for extra, _ in given]
    writer.start(path, lambda: copy_pieces(state), documents, total_bytes(arrays.values()), on_commit)


def wait_for(writer: Writer) -> None:
    """Wait until every process has written its part; raise the writer's errors.

    After an error the incomplete files are removed, because the next save on a full disk needs their space.
    """
    try:
        if not all(together(writer.wait)):
            raise OSError(errno.EIO, "a process did not write its part of the checkpoint; earlier ones are untouched")
    except Exception:
        writer.remove_unfinished()
        raise


def bytes_of(state: TrainState) -> int:
    """Return the bytes of a state's checkpoint, over all processes."""
    return total_bytes(logical_arrays(state).values())


def _check_documents(extra: Any, config: Any, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Check that the documents saved with a state are plain JSON; return the metrics as floats."""
    for name, value in (("extra", extra), ("config", config)):
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: {error}; data saved with a state must be plain JSON") from error
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"metrics: {name!r} is {value!r}; pass a number or a scalar array") from error
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
    """Read a checkpoint into a state of any mesh, strategy, engine and storage, with layers stacked or listed.

    The files to read are first compared with their digests; the processes share that work.

    Layout:  each process reads only the slices of its devices, in chunks of at most about 16 MiB.
    Cost:    no communication, except with `one_replica`.
    Memory:  on the host, twice the blocks in flight (1 GiB, or one device's block of the largest array if that is
             larger), and 256 MiB of chunks. `jfsdp.checkpoint.to_devices.peak_bytes` returns the number.

    Args:
      path: a checkpoint of `save`, or one step of a run.
      like: a live state, or `model.abstract_state(tx)`. Arrays that are not restored are taken from it: those excluded
        by `only` and `skip`, and frozen leaves that the checkpoint omits.
      only, skip: globs of array names, or of names above them, to read or to leave out: `only="params"` ignores the
        checkpoint's optimizer state, `skip="params.lm_head"` keeps the new head of `like`.
      one_replica: only the first of the devices with the same block (replicas, ddp) reads it, and sends it to the
        others by an all-reduce. Use it if the file system is slower than the network.

    Raises:
      ValueError: if there is no checkpoint; if files are damaged (lists them); if names, shapes or dtypes differ (lists
        them); if the checkpoint omits frozen leaves, and those of `like` are not the ones it was trained on.
    """
    mesh: Any = getattr(like.step.sharding, "mesh", None)
    if isinstance(mesh, jax.sharding.AbstractMesh):
        raise ValueError(f"checkpoint {path}: the mesh of `like` has no devices; build the model on make_mesh()")
    if (only is not None or skip is not None) and not isinstance(like.step, jax.Array):
        raise ValueError(f"checkpoint {path}: only= and skip= keep arrays of `like`; pass a live state as `like`")
    source, view, wanted = in_all(lambda: _open(path, like, only, skip))
    if base := source.manifest.get("base"):
        check_base(path, base, like)
    source.check({name for want in wanted for name in view.sources(want)})
    return fill(like, view, wanted, one_replica=one_replica)


def _open(path: Any, like: TrainState, only: Any, skip: Any) -> tuple[CheckpointSource, ConvertedLayers, list[str]]:
    """Open a checkpoint. Return its source, the source under the names of `like`, and the names to read.

    Raises:
      ValueError: if names, logical shapes or dtypes differ from those of `like`; lists them.
    """
    source, requested = open_checkpoint(path), logical_arrays(like)
    base = {f"params.{name}" for name in source.manifest.get("base", ())}
    wanted = [name for name in choose(requested, only, skip) if name not in base]
    if not wanted:
        raise ValueError(f"checkpoint {path}: has no frozen leaves, and only= and skip= select no others; widen them")
    view = ConvertedLayers(source, {name: requested[name] for name in wanted})
    whole, impls = only is None and skip is None, source.key_impls
    saved = {name: _show(array, impls.get(name)) for name, array in view.arrays.items() if whole or name in wanted}
    ours = {name: _show(requested[name], requested[name].key_impl) for name in wanted}
    if lines := list_differences(saved, ours):
        stored = (source.manifest["layout"] or {}).get("leaves", ())
        trainable = {leaf["path"]: leaf["trainable"] for leaf in stored}
        frozen = whole and differing_frozen(trainable, {x.path: x.trainable for x in like.layout.leaves})
        remedy = frozen or (
            "build the model and the optimizer of the checkpoint (`jfsdp checkpoint inspect` shows them), or read "
            "the matching arrays into a live state: only=, skip="
        )
        raise ValueError(f"checkpoint {path} is of another model or optimizer:\n{lines}\n  {remedy}")
    _check_scales(source, like, wanted)
    return source, view, wanted


def fill(like: TrainState, source: Source, wanted: Collection[str], *, one_replica: bool = False) -> TrainState:
    """Return a state with the wanted arrays read from a source and the others taken from `like`.

    Layout, Cost, Memory: as `restore`.
    """
    arrays = contents(like)
    read = [stored for stored in arrays if stored.name in wanted]
    placed = place(read, subset(source, wanted), one_replica=one_replica)
    found: dict[str, Any] = {stored.name: array for stored, array in zip(read, placed, strict=True)}
    return with_work(rebuild(like, [found.get(stored.name, stored.value) for stored in arrays]), like)


def choose(arrays: Mapping[str, Any], only: Any, skip: Any) -> list[str]:
    """Return the names that match `only` and not `skip`.

    Raises:
      ValueError: if a pattern matches nothing, or no name remains.
    """
    chosen = arrays if only is None else select_leaves("only", only, arrays, {})
    skipped = select_leaves("skip", skip, arrays, {})
    remaining = [name for name in arrays if name in chosen and name not in skipped]
    if not remaining:
        raise ValueError(f"only={only!r} and skip={skip!r} leave nothing to read; widen one of them")
    return remaining


def _check_scales(source: CheckpointSource, like: TrainState, wanted: Collection[str]) -> None:
    """Check that the model scales its adapters as in training."""
    stated = (source.manifest["layout"] or {}).get("adapters", ())
    saved, read = {one["path"]: Adapter.from_dict(one) for one in stated}, {*wanted}
    for ours in like.layout.adapters:
        theirs = saved.get(ours.path, ours)
        if theirs.scale != ours.scale and f"params.{ours.name(A)}" in read:
            raise ValueError(
                f"checkpoint {source.path}: has the adapter [{theirs.describe()}], scale {theirs.scale:g}, but the "
                f"model has [{ours.describe()}], scale {ours.scale:g}; set the alpha that it was trained with"
            )


def _show(array: Any, key_impl: str | None) -> str:
    keys = f" of {key_impl} keys" if key_impl else ""
    return f"{jax.numpy.dtype(array.dtype).name}{list(array.shape)}{keys}"
