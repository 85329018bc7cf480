"""What PyTorch puts around the names and values of a model: wrappers, outer dicts, dtypes; and torch itself, imported
only here and only when it is needed.

[Note: names from PyTorch]
A name is the path of dict keys below the dict chosen by `key`, joined by ".". What wrappers of a module add to it is
no part of the model and is taken out: `_orig_mod` (compile), `_fsdp_wrapped_module` (FSDP1) and
`_checkpoint_wrapped_module` (activation checkpointing) wherever they stand, `module` (DDP, averaged models) at the
beginning only, since inside a model it is a name like any other. No outer dict is chosen silently.
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
        raise ValueError("a PyTorch checkpoint is read by torch, which is not installed; pip install torch") from error
    return torch


def plain_name(keys: Iterable[str]) -> str:
    """Join dict keys to the name of a parameter, without wrappers ([Note: names from PyTorch])."""
    parts = [part for part in ".".join(keys).split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        del parts[0]
    return ".".join(parts)


def select(where: str, tensors: Mapping[Keys, T], others: Iterable[Keys], key: str | None) -> dict[str, T]:
    """Return the tensors of one dict of a checkpoint, by plain name.

    Args:
      where: what errors begin with.
      tensors: by path of dict keys.
      others: the paths of what is no tensor.
      key: the dict, by its path of keys joined by "."; None if tensors lie at the top alone, or in one dict there; ""
        for all there is.

    Raises:
      ValueError: if there is no such dict, if there are dicts and none was chosen, for two tensors of one name, or for
        flat parameters of FSDP1.
    """
    tops = {keys[0] for keys in tensors if keys}
    if key is None and len(tops) == 1 and all(len(keys) > 1 for keys in tensors):
        key = tops.pop()  # there is but one dict that holds tensors
    if key is None and any(len(keys) > 1 for keys in tensors):
        raise ValueError(
            f"{where}: has dicts at the top, and which of them holds the model is not guessed; pass key= (--key, "
            f"--init-key); at the top are {_top(tensors, others)}"
        )
    chosen: dict[str, T] = {}
    for keys, value in tensors.items():
        ends = (end for end in range(1, len(keys)) if ".".join(keys[:end]) == key)
        below = next((keys[end:] for end in ends), ()) if key else keys
        name = plain_name(below)
        if name in chosen:
            raise ValueError(f"{where}: two tensors are called {name} once wrappers are taken out; rename one of them")
        if below:
            chosen[name] = value
    if not chosen:
        raise ValueError(f"{where}: has no dict {key!r} with tensors; pass one of {_top(tensors, others)} as key=")
    if flat := [name for name in chosen if name.rpartition(".")[2] in _FLAT]:
        raise ValueError(
            f"{where}: {flat[0]} (and {len(flat) - 1} more) are flat parameters of FSDP1; save in PyTorch what "
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) returns"
        )
    return chosen


def _top(tensors: Mapping[Keys, Any], others: Iterable[Keys]) -> str:
    counts = Counter({keys[0]: 0 for keys in others if keys})
    counts.update(keys[0] for keys in tensors)
    parts = [f"{name} ({num} tensors)" if num else f"{name} (no tensor)" for name, num in counts.items()]
    return ", ".join(parts[:20]) + (f" and {len(parts) - 20} more" if len(parts) > 20 else "") or "nothing"


def numpy_dtype(where: str, name: str, dtype: Any) -> np.dtype:
    """Return numpy's (or ml_dtypes') form of a torch dtype.

    Raises:
      ValueError: for a dtype that has none, such as the quantized ones.
    """
    plain = str(dtype).removeprefix("torch.")
    if plain not in _DTYPES:
        raise ValueError(f"{where}: {name} has dtype {plain}, which is not read; cast it in PyTorch, to float32 say")
    return jnp.dtype(plain)


def to_numpy(tensor: Any, dtype: np.dtype) -> np.ndarray:
    """View a CPU tensor as an array of `dtype`, bit by bit; what numpy does not know goes through an integer view."""
    if dtype.kind == "V" or dtype.name.startswith(("bfloat", "float8")):
        torch = import_torch()
        integer = {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
        return tensor.view(integer).numpy().view(dtype)
    return tensor.numpy()
