"""PyTorch checkpoints as sources: directories of torch.distributed.checkpoint (DCP) and files of torch.save.

Needs the extra `torch`. Unpickles only what PyTorch loads with `weights_only=True`.

With `key=""` a source also has the optimizer's states, under names that adam.py interprets.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jfsdp.checkpoint.disk.files import inside
from jfsdp.checkpoint.disk.paths import existing_path
from jfsdp.checkpoint.foreign.torch_metadata import load_metadata
from jfsdp.checkpoint.foreign.torch_names import Keys, import_torch, numpy_dtype, select, to_numpy
from jfsdp.checkpoint.source import Index, Source
from jfsdp.objects.path import is_address


def open_torch(path: Any, key: str | None = None) -> Source:
    """Open a DCP directory, or a `.pt`, `.pth` or `.bin` file, under the names of the PyTorch model.

    Reads only names and shapes. [Note: names from PyTorch] describes how names are changed.

    Args:
      key: the dict that contains the model, as its path of keys joined by "." ("model", "app.model", "state_dict");
        None if the tensors are at the top; "" for all tensors.

    Raises:
      ValueError: if torch is missing, or if the checkpoint is damaged, incomplete, ambiguous, or only readable by
        running code in it.
    """
    path = existing_path(path)
    if is_address(path):
        raise ValueError(f"checkpoint {path}: PyTorch reads its formats from a file system; copy the files to one")
    if path.name == ".metadata" or path.suffix == ".distcp" or path.name.endswith("_optim_states.pt"):
        raise ValueError(f"checkpoint {path}: is a part of a checkpoint; pass its directory, {path.parent}")
    return DCPSource(path, key) if path.is_dir() else TorchFileSource(path, key)


class DCPSource:
    """A directory of torch.distributed.checkpoint, written by any sharding and number of processes.

    Memory:  a read takes the slice and one chunk at a time (the part of a tensor that one process saved). Chunks that
             overlap the slice are read whole.
    """

    def __init__(self, path: Any, key: str | None = None):
        """Read names and shapes. For `key` and the errors see `open_torch`."""
        import_torch()
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self._path, self._where = Path(path), f"checkpoint {path}"
        metadata = load_metadata(self._path)
        entries = metadata.state_dict_metadata
        keys = {name: tuple(map(str, (metadata.planner_data or {}).get(name, (name,)))) for name in entries}
        tensors = {keys[name]: (name, x) for name, x in entries.items() if isinstance(x, TensorStorageMetadata)}
        others = [keys[name] for name, x in entries.items() if not isinstance(x, TensorStorageMetadata)]
        self._tensors = select(self._where, tensors, others, key)
        self.arrays: Mapping[str, jax.ShapeDtypeStruct] = {
            name: jax.ShapeDtypeStruct(tuple(x.size), numpy_dtype(self._where, name, x.properties.dtype))
            for name, (_, x) in self._tensors.items()
        }
        _check_complete(self._path, self._tensors, metadata.storage_data)
        self._reader = FileSystemReader(self._path)
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)

    def read(self, name: str, index: Index) -> np.ndarray:
        """Read one slice of one tensor; see `Source.read`."""
        torch = import_torch()
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
        from torch.distributed.checkpoint.planner import LoadPlan

        stored, x = self._tensors[name]
        target = torch.empty([s.stop - s.start for s in index], dtype=x.properties.dtype)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({stored: target}, is_coordinator=True)
        plan = LoadPlan(list(_overlaps(stored, x.chunks, index)))
        with _readable(self._where):
            self._reader.read_data(plan, planner).wait()
        return to_numpy(target, self.arrays[name].dtype)


def _check_complete(path: Path, tensors: Mapping[str, tuple[str, Any]], storage: Mapping[Any, Any]) -> None:
    """Check that all chunks of the selected tensors, and their files, are there."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    ends: dict[str, tuple[int, str]] = {}
    for name, (stored, tensor) in tensors.items():
        chunks = [chunk for chunk in tensor.chunks if math.prod(chunk.sizes)]
        places = [storage.get(MetadataIndex(stored, chunk.offsets)) for chunk in chunks]
        if None in places or sum(math.prod(chunk.sizes) for chunk in chunks) < math.prod(tensor.size):
            raise ValueError(f"checkpoint {path}: chunks of {name} {list(tensor.size)} are missing; save it again")
        for place in filter(None, places):
            file = place.relative_path
            ends[file] = max(ends.get(file, (0, "")), (place.offset + place.length, name))
    for relative_path, (end, name) in ends.items():
        file = inside(path, relative_path)
        found = f"has {file.stat().st_size:,} of {end:,} bytes" if file.is_file() else "is missing"
        if not file.is_file() or file.stat().st_size < end:
            raise ValueError(f"checkpoint {path}: {relative_path} with {name} {found}; copy the files of all processes")


def _overlaps(stored: str, chunks: Sequence[Any], index: Index) -> Iterator[Any]:
    """Yield, for every chunk that a slice overlaps, the overlapping part and its place in the slice."""
    from torch import Size
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

    for chunk in chunks:
        starts = [max(s.start, offset) for s, offset in zip(index, chunk.offsets, strict=True)]
        ends = [min(s.stop, o + size) for s, o, size in zip(index, chunk.offsets, chunk.sizes, strict=True)]
        lengths = [end - start for start, end in zip(starts, ends)]
        if all(length > 0 for length in lengths):
            yield ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex(stored),
                dest_offsets=Size([start - s.start for start, s in zip(starts, index)]),
                storage_index=MetadataIndex(stored, chunk.offsets),
                storage_offsets=Size([start - offset for start, offset in zip(starts, chunk.offsets)]),
                lengths=Size(lengths),
            )


class TorchFileSource:
    """A file of torch.save with a model's tensors in nested dicts. Names that share a storage are separate arrays.

    Memory:  the file is mapped; a read copies its slice, whose pages may stay in the system's cache.
    """

    def __init__(self, path: Any, key: str | None = None):
        """Map the file, and read names and shapes. For `key` and the errors see `open_torch`."""
        torch = import_torch()
        self._where = f"checkpoint {path}"
        found = load_torch(Path(path))
        if not isinstance(found, Mapping):
            raise ValueError(f"{self._where}: contains a {type(found).__name__}; save a dict of tensors by name")
        leaves = dict(_flatten(found))
        tensors = {keys: x for keys, x in leaves.items() if isinstance(x, torch.Tensor)}
        others = [keys for keys in leaves if keys not in tensors]
        self._tensors = select(self._where, tensors, others, key)
        for name, tensor in self._tensors.items():  # sharded or sparse tensors and subclasses are not plain arrays
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
                raise ValueError(
                    f"{self._where}: {name} is a {type(tensor).__name__} of layout {tensor.layout}; save dense ones: "
                    "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), or with DCP"
                )
        self.arrays: Mapping[str, jax.ShapeDtypeStruct] = {
            name: jax.ShapeDtypeStruct(tuple(x.shape), numpy_dtype(self._where, name, x.dtype))
            for name, x in self._tensors.items()
        }

    def read(self, name: str, index: Index) -> np.ndarray:
        """Read one slice of one tensor; see `Source.read`."""
        torch = import_torch()
        part = self._tensors[name].detach()[index].clone(memory_format=torch.contiguous_format)
        return to_numpy(part, self.arrays[name].dtype)


def _flatten(value: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield the values in nested dicts and lists, with their paths."""
    if isinstance(value, Mapping):
        pairs = value.items()
    elif isinstance(value, list | tuple):
        pairs = enumerate(value)
    else:
        yield keys, value
        return
    for key, inner in pairs:
        yield from _flatten(inner, (*keys, str(key)))


def load_torch(path: Path, *, any_class: bool = False) -> Any:
    """Read a file of torch.save, with its tensors mapped. Runs no code in it.

    Args:
      any_class: read objects of unknown classes as placeholders instead of refusing the file.

    Raises:
      ValueError: if the file is damaged, compressed or of another format, or contains unknown classes.
    """
    torch, where = import_torch(), f"checkpoint {path}"
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            raise ValueError(f"{where}: is not a zip file of torch.save; write it again with torch.save")
    with _readable(where), zipfile.ZipFile(path) as archive:
        zipped = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
    if zipped:
        raise ValueError(f"{where}: {zipped[0]} in it is compressed, so its size is unknown; write it with torch.save")
    with _readable(where):
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(str(path)) if any_class else []
        with torch.serialization.safe_globals([(_Placeholder, name) for name in unknown]):
            return torch.load(str(path), map_location="cpu", mmap=True, weights_only=True)


class _Placeholder:
    """Stands for an object of a class that is not loaded."""

    def __init__(self, *args: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass


@contextlib.contextmanager
def _readable(where: str) -> Iterator[None]:
    """Convert torch's errors for files that it cannot or will not load to an error with a remedy."""
    try:
        yield
    except Exception as error:  # the unpickler may raise any error for a damaged file
        blocked = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if blocked:
            reason = f"loading {blocked[1]} would run code and is refused; save only model.state_dict()"
            raise ValueError(f"{where}: {reason}") from error
        # Torch's text may advise to load without restriction; then only the kind of the error is shown.
        lines = [] if "weights_only" in str(error) else str(error).splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise ValueError(f"{where}: cannot be read; it is damaged or of another format ({reason})") from error
