"""The `.metadata` file of torch.distributed.checkpoint (DCP), read without running code in it.

[Note: metadata is a pickle]
PyTorch's reader unpickles `.metadata` without restriction, and so runs any code in a downloaded checkpoint. Here only
the classes that DCP writes are allowed, by name.
"""

from __future__ import annotations

import pickle
from pathlib import Path, PurePosixPath
from typing import Any

from jfsdp.checkpoint.foreign.torch_names import import_torch

_ALLOWED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
}
# The path of the save, which is not used; its class may not exist on this system.
_PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        torch = import_torch()
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return PurePosixPath
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise _RefusedError(f"{module}.{name}")


class _RefusedError(pickle.UnpicklingError):
    pass


def load_metadata(path: Path) -> Any:
    """Return the `Metadata` of a DCP directory: tensors, their chunks, and the location of these.

    Raises:
      ValueError: if the directory is not a complete checkpoint, or its metadata is damaged or contains code.
    """
    file = path / ".metadata"
    if not file.is_file():
        parts = sorted(x.name for x in path.glob("*.distcp"))
        found = f"{parts[0]} is there, so the save was not finished" if parts else "it was not written by DCP"
        raise ValueError(f"checkpoint {path}: has no .metadata ({found}); pass DCP's directory or a file of torch.save")
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        with file.open("rb") as stream:
            metadata = _Unpickler(stream).load()
    except _RefusedError as error:
        reason = f"loading {error} could run code and is refused; save again with the FileSystemWriter of DCP"
        raise ValueError(f"checkpoint {path}: {reason}") from error
    except Exception as error:  # the unpickler may raise any error for a damaged file
        raise ValueError(f"checkpoint {path}: its .metadata is damaged ({error}); copy or save it again") from error
    if not isinstance(metadata, Metadata) or metadata.storage_data is None:
        raise ValueError(f"checkpoint {path}: its .metadata ({type(metadata).__name__}) lists no files; save it again")
    return metadata
