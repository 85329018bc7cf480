"""Checkpoints of DeepSpeed ZeRO-1, 2 and 3 as a source.

[Note: partitions of ZeRO]
DeepSpeed flattens parameters, and each process saves a part of the result. ZeRO-1 and 2 flatten a whole group of
parameters and cut the vector once. ZeRO-3 cuts each parameter, pads it, and joins what a process has of all of them.
Master weights and moments have the same form. Names, shapes and order are in the model's file (`param_shapes`). The
order in `param_slice_mappings` is another one, and wrong, with `round_robin_gradients` (DeepSpeed 0.19.8).

Source: `deepspeed/utils/zero_to_fp32.py`, which does the same for weights.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jfsdp.checkpoint.disk.files import inside
from jfsdp.checkpoint.foreign.torch_names import Keys, import_torch, numpy_dtype, select, to_numpy
from jfsdp.checkpoint.foreign.torch_source import load_torch
from jfsdp.checkpoint.source import Index

_OPTIMIZER, _MODEL = "_optim_states.pt", "_model_states.pt"

Part = tuple[Any, int, int]  # a flat tensor, and a range of its elements
Array = tuple[tuple[int, ...], list[Part]]  # a shape, and the parts that form the flattened array


def find_deepspeed(path: Path) -> Path | None:
    """Return the directory with a DeepSpeed checkpoint's files: this one, or the one in it that `latest` names.

    Raises:
      ValueError: if `latest` names a directory without these files.
    """
    if any(path.glob(f"*{_MODEL}")):
        return path
    if not (latest := path / "latest").is_file():
        return None
    directory = inside(path, latest.read_text().strip())
    if not any(directory.glob(f"*{_MODEL}")):
        raise ValueError(f"checkpoint {path}: latest names {directory.name}, which has no *{_MODEL}; copy it too")
    return directory


class DeepSpeedSource:
    """A checkpoint of DeepSpeed ZeRO-1, 2 or 3, saved by any number of processes.

    Arrays are named as in a PyTorch checkpoint with the dicts `module` and `optimizer`: `module.<name>` are the master
    weights, `optimizer.state.<name>.exp_avg` and so on are the states. See [Note: partitions of ZeRO].

    Memory:  files are mapped; a read copies its slice.
    """

    def __init__(self, path: Path, key: str | None = None):
        """Map the files, and read names and shapes.

        Args:
          path: the directory with the files.
          key: as in `open_torch`; None: `module`.

        Raises:
          ValueError: if the checkpoint is incomplete or damaged, is not of ZeRO, or splits the model by other means
            than data parallelism.
        """
        self._where = f"checkpoint {path}"
        names = sorted(
            (file.name for file in path.glob("*_states.pt")), key=lambda name: [*map(int, re.findall(r"\d+", name))]
        )
        if other := [x for x in names if "expert" in x or "mp_rank_00_" not in x]:
            raise ValueError(
                f"{self._where}: has {other[0]}, of a model that is split by experts, stages or tensors; convert the "
                "weights with DeepSpeed"
            )
        model_files, rank_files = (
            [path / name for name in names if name.endswith(end)] for end in (_MODEL, _OPTIMIZER)
        )
        if not rank_files:
            raise ValueError(f"{self._where}: has no *{_OPTIMIZER} of ZeRO; pass {path / names[0]} with the key module")
        models = [load_torch(model_files[0], any_class=True)]
        if models[0].get("frozen_param_shapes"):  # the other files have fragments of them
            models += [load_torch(file, any_class=True) for file in model_files[1:]]
        try:
            ranks = [_Rank(load_torch(file, any_class=True)) for file in rank_files]
            num = ranks[0].num_ranks
            if (len(rank_files), len(model_files)) != (num, num if ranks[0].is_stage_3 else 1):
                raise _MismatchError(
                    f"{len(model_files)} *{_MODEL} and {len(rank_files)} *{_OPTIMIZER} of {num} processes"
                )
            tensors = dict(_tensors(models, ranks))
        except (KeyError, IndexError, TypeError, AttributeError, _MismatchError) as error:
            reason = str(error) if isinstance(error, _MismatchError) else f"{type(error).__name__}: {error}"
            raise ValueError(
                f"{self._where}: its files do not belong together, or are not as DeepSpeed 0.8 to 0.19 writes them "
                f"({reason}); copy the files of all processes of one checkpoint"
            ) from error
        self._tensors = select(self._where, tensors, (), "module" if key is None else key)
        for name, (shape, parts) in self._tensors.items():
            if (size := sum(stop - start for _, start, stop in parts)) < math.prod(shape):
                raise ValueError(f"{self._where}: has {size:,} elements of {name} {list(shape)}; save it again")
        self.arrays: Mapping[str, jax.ShapeDtypeStruct] = {
            name: jax.ShapeDtypeStruct(shape, numpy_dtype(self._where, name, parts[0][0].dtype))
            for name, (shape, parts) in self._tensors.items()
        }

    def read(self, name: str, index: Index) -> np.ndarray:
        """Read one slice of one array; see `Source.read`."""
        shape, parts = self._tensors[name]
        row, rows = math.prod(shape[1:]), index[0] if shape else slice(0, 1)
        first, last, begin = rows.start * row, rows.stop * row, 0
        out = np.empty(last - first, self.arrays[name].dtype)
        for tensor, start, stop in parts:
            low, high = max(first - begin, 0), min(last - begin, stop - start)
            if low < high:
                block = to_numpy(tensor[start + low : start + high], out.dtype)
                out[begin + low - first : begin + high - first] = block
            begin += stop - start
        return out.reshape(-1, *shape[1:])[(slice(None), *index[1:])] if shape else out.reshape(())


class _MismatchError(Exception):
    pass


class _Rank:
    """What one process saved of the optimizer.

    Attributes:
      groups: for each flat group, its tensors: the master weights as "", and the states by name.
      paddings: ZeRO-1 and 2: for each group, the number of elements between each parameter and the next.
      steps: the numbers of updates of the groups; empty if they were not saved.
    """

    def __init__(self, contents: Mapping[str, Any]):
        zero = contents["optimizer_state_dict"]
        self.is_stage_3 = "fp32_flat_groups" in zero
        weights = zero["fp32_flat_groups" if self.is_stage_3 else "single_partition_of_fp32_groups"]
        self.num_ranks, self.paddings = np.max(zero["partition_count"]), zero.get("param_alignment_paddings")
        optimizer = zero["optimizer_state_dict" if self.is_stage_3 else "base_optimizer_state"]
        groups = [] if isinstance(optimizer, list) else optimizer["param_groups"]
        states = (
            optimizer if isinstance(optimizer, list) else [optimizer["state"].get(i, {}) for i in range(len(weights))]
        )
        self.groups = [
            {"": flat.detach(), **{kind: x for kind, x in state.items() if kind != "step" and hasattr(x, "numel")}}
            for flat, state in zip(weights, states, strict=True)
        ]
        # FusedAdam also has an unused count in its groups.
        self.steps = {int(x["step"]) for x in states if "step" in x} or {int(x["step"]) for x in groups if "step" in x}


def _tensors(models: Sequence[Any], ranks: Sequence[_Rank]) -> Iterator[tuple[Keys, Array]]:
    """Yield, by the path of dict keys, the shape of each array and the parts that form it."""
    torch, model, steps = import_torch(), models[0], set[int]().union(*(rank.steps for rank in ranks))
    if len(steps) > 1:
        raise _MismatchError(f"groups were updated {sorted(steps)} times")
    found: dict[str, dict[str, Array]] = {}
    for name, shape, pieces in _pieces(model["param_shapes"], ranks):
        found[name] = {}
        for kind in pieces[0][0][0]:
            parts = (_cut([group[kind] for group in groups], *where) for groups, *where in pieces)
            found[name][kind] = shape, list(itertools.chain(*parts))
        if steps:
            found[name]["step"] = (), [(torch.tensor([*steps]), 0, 1)]
    for name, shape in (model.get("frozen_param_shapes") or {}).items():
        fragments = [one["frozen_param_fragments"][name].detach().flatten() for one in models]
        found[name] = {"": (tuple(shape), [(x, 0, x.numel()) for x in fragments])}
    for copy, name in (model.get("shared_params") or {}).items():
        found[copy] = {"": found[name][""]}
    for name, tensor in model["module"].items():  # buffers, and with ZeRO-1 frozen parameters
        whole = {"": (tuple(tensor.shape), [(tensor.detach().flatten(), 0, tensor.numel())])}
        found.setdefault(name, whole)
    for name, arrays in found.items():
        for kind, array in arrays.items():
            yield ("optimizer", "state", name, kind) if kind else ("module", name), array


def _pieces(groups: Sequence[Any], ranks: Sequence[_Rank]) -> Iterator[tuple[str, tuple[int, ...], list[Any]]]:
    """Yield the name and shape of each trained parameter, and where it is: flat groups, first element, length."""
    if ranks[0].is_stage_3:
        start = 0
        for name, shape in (pair for group in groups for pair in group.items()):
            length = -(-math.prod(shape) // len(ranks))
            yield name, tuple(shape), [(rank.groups, start, length) for rank in ranks]
            start += length
        _check_used(start, [group[""] for group in ranks[0].groups], 1)
        return
    paddings = ranks[0].paddings or [[0] * len(group) for group in groups]
    if len(groups) != len(ranks[0].groups):
        raise _MismatchError(f"{len(groups)} groups of parameters and {len(ranks[0].groups)} of states")
    for place, group in enumerate(groups):
        start = 0
        for (name, shape), padding in zip(group.items(), paddings[place], strict=True):
            yield name, tuple(shape), [([rank.groups[place] for rank in ranks], start, math.prod(shape))]
            start += math.prod(shape) + padding
        _check_used(start, [rank.groups[place][""] for rank in ranks], 2 * len(ranks))


def _check_used(size: int, flat: Sequence[Any], alignment: int) -> None:
    """Check that parameters of this size fill flat tensors, up to their padding."""
    found = sum(tensor.numel() for tensor in flat)
    if not 0 <= found - size < alignment:
        raise _MismatchError(f"parameters of {size:,} elements and states of {found:,}")


def _cut(tensors: Sequence[Any], start: int, length: int) -> Iterator[Part]:
    """Yield the parts of flat tensors that form a range of their concatenation."""
    for tensor in tensors:
        low, high = max(start, 0), min(start + length, tensor.numel())
        if low < high:
            yield tensor, low, high
        start -= tensor.numel()
