"""Names and dtypes of PyTorch checkpoints, without wrappers and outer dicts; import of torch, only when needed.

[Note: names from PyTorch]
A name is the path of dict keys below the dict chosen by `key`, joined by ".". Module wrappers add words that are not
part of the model and are removed: `_orig_mod` (compile), `_fsdp_wrapped_module` (FSDP1) and
`_checkpoint_wrapped_module` (activation checkpointing) anywhere, `module` (DDP, averaged models) only at the beginning,
since it is an ordinary name inside a model. No outer dict is chosen silently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

Keys = tuple[str, ...]
T = TypeVar("T")

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_TRAINING = {"optimizer", "optim", "lr_scheduler", "dataloader", "train_state"}  # dicts of torchtitan's checkpoints
_FLAT = {"_flat_param", "flat_param"}
_DTYPES = {
    *("float64", "float32", "float16", "bfloat16", "bool", "complex64", "complex128"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
}


def import_torch() -> Any:
    """Import torch.

    Raises:
      ValueError: if it is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise ValueError("PyTorch checkpoints need torch, which is not installed; pip install torch") from error
    return torch


def plain_name(keys: Iterable[str]) -> str:
    """Join dict keys to a parameter's name, without wrappers ([Note: names from PyTorch])."""
    parts = [part for part in ".".join(keys).split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        del parts[0]
    return ".".join(parts)


def select(where: str, tensors: Mapping[Keys, T], others: Iterable[Keys], key: str | None) -> dict[str, T]:
    """Return the tensors of one dict of a checkpoint, by plain name.

    Args:
      where: beginning of errors.
      tensors: by path of dict keys.
      others: paths of values that are not tensors.
      key: the dict, as its path of keys joined by "."; None if tensors are only at the top, or only in one dict there,
        apart from the training state (`optimizer`, `lr_scheduler`, ...); "" for all tensors.

    Raises:
      ValueError: if there is no such dict, if there are dicts and none was chosen, if two tensors get one name, or if
        there are flat parameters of FSDP1.
    """
    if key is None and tensors:
        path, inside = (), tensors
        while True:
            rest = {keys: x for keys, x in inside.items() if _dict_at(len(path), keys) not in _TRAINING} or inside
            found = {_dict_at(len(path), keys) for keys in rest}
            if len(found) > 1 or None in found or (path and len(rest) == len(inside)):
                break
            path, inside = (*path, str(found.pop())), rest  # the only dict with tensors
        key = ".".join(path) or None
        tensors = rest if found == {None} and not path else tensors
    if key is None and any(len(keys) > 1 for keys in tensors):
        raise ValueError(
            f"{where}: has dicts at the top, and it is not clear which one is the model; pass key= (--key, "
            f"--init-key); at the top are {_top(tensors, others)}"
        )
    chosen: dict[str, T] = {}
    for keys, value in tensors.items():
        ends = (end for end in range(1, len(keys)) if ".".join(keys[:end]) == key)
        below = next((keys[end:] for end in ends), ()) if key else keys
        name = plain_name(below)
        if name in chosen:
            raise ValueError(f"{where}: two tensors are named {name} without their wrappers; rename one of them")
        if below:
            chosen[name] = value
    if not chosen:
        raise ValueError(f"{where}: has no dict {key!r} with tensors; pass one of {_top(tensors, others)} as key=")
    if flat := [name for name in chosen if name.rpartition(".")[2] in _FLAT]:
        raise ValueError(
            f"{where}: {flat[0]} (and {len(flat) - 1} more) are flat parameters of FSDP1; in PyTorch, save the result "
            "of get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))"
        )
    return chosen


def _dict_at(depth: int, keys: Keys) -> str | None:
    """Return the key of the dict at a depth that contains a value; None if the value is not in a dict there."""
    return keys[depth] if len(keys) > depth + 1 else None


def _top(tensors: Mapping[Keys, Any], others: Iterable[Keys]) -> str:
    counts = Counter({keys[0]: 0 for keys in others if keys})
    counts.update(keys[0] for keys in tensors)
    parts = [f"{name} ({num} tensors)" if num else f"{name} (no tensor)" for name, num in counts.items()]
    return ", ".join(parts[:20]) + (f" and {len(parts) - 20} more" if len(parts) > 20 else "") or "nothing"


def numpy_dtype(where: str, name: str, dtype: Any) -> np.dtype:
    """Return the numpy or ml_dtypes equivalent of a torch dtype.

    Raises:
      ValueError: if there is none, as for quantized dtypes.
    """
    plain = str(dtype).removeprefix("torch.")
    if plain not in _DTYPES:
        raise ValueError(f"{where}: {name} has dtype {plain}, which is not supported; cast it to float32")
    return jnp.dtype(plain)


def to_numpy(tensor: Any, dtype: np.dtype) -> np.ndarray:
    """View a CPU tensor as an array of `dtype`; dtypes that numpy lacks through a view as integers."""
    if dtype.kind == "V" or dtype.name.startswith(("bfloat", "float8")):
        torch = import_torch()
        integer = {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
        return tensor.view(integer).numpy().view(dtype)
    return tensor.numpy()
