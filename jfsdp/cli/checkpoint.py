"""`jfsdp checkpoint`: inspect, verify, compare, convert and prune checkpoints."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from pathlib import Path
from typing import Annotated, Any

import tyro
from jax.numpy import dtype

from jfsdp.checkpoint.diff import Differences, diff
from jfsdp.checkpoint.disk.digest import check_documents
from jfsdp.checkpoint.disk.files import bytes_below, read_manifest
from jfsdp.checkpoint.disk.paths import absolute_path, find_checkpoint, find_checkpoints
from jfsdp.checkpoint.disk.reader import STREAM_BYTES
from jfsdp.checkpoint.foreign.peft_files import CONFIG, open_peft
from jfsdp.checkpoint.foreign.safetensors import SafetensorsSource
from jfsdp.checkpoint.objects.reader import open_checkpoint
from jfsdp.checkpoint.source import PIECE_BYTES, Watched, subset, total_bytes
from jfsdp.checkpoint.verify import MEMORY_BYTES, verify
from jfsdp.cli.console import BROKEN, Reporting, make_console, make_table, print_facts, print_verdict, print_wrapped
from jfsdp.cli.transfer import Convert, Export, Globs, Import, Merge, PathArgument, Unmerge
from jfsdp.layout.lora import Adapter
from jfsdp.layout.report import show_bytes
from jfsdp.layout.select import select_leaves
from jfsdp.objects.path import as_path
from jfsdp.trainer.help_groups import option
from jfsdp.trainer.options import Number, optional
from jfsdp.trainer.run.directory import read_config

_OfRun = Annotated[str, tyro.conf.arg(metavar="PATH", help="The directory of a run.")]


@dataclasses.dataclass(frozen=True)
class Inspect(Reporting):
    """Print the contents of checkpoints: arrays with shapes and dtypes, bytes, step, layout, configuration.

    PATH is a checkpoint, or the directory of a run, whose steps are listed. Exit status: 0; 4 for damaged metadata
    (`verify` reads the arrays too), 2 no checkpoint.
    """

    path: tyro.conf.Positional[PathArgument]

    def run(self) -> int:
        paths = find_checkpoints(self.path)
        if len(paths) > 1:
            rows = [_row(path) for path in paths]
            self.report(rows, lambda: _print_steps(rows))
            return BROKEN if any(row["problem"] for row in rows) else 0
        found = _describe(paths[0])
        self.report(found, lambda: _print_checkpoint(found))
        return 0


@dataclasses.dataclass(frozen=True)
class Verify(Reporting):
    """Check the integrity of checkpoints: digests, completeness, every chunk, finite numbers.

    PATH is a checkpoint, or the directory of a run, of which all steps are checked. Exit status: 0 no problems, 4
    problems, 2 no checkpoint.
    """

    path: tyro.conf.Positional[PathArgument]

    def run(self) -> int:
        paths = find_checkpoints(self.path)
        results: dict[str, Any] = {}
        with self.progress_of("verifying", MEMORY_BYTES, 2 * sum(map(bytes_below, paths))) as progress:
            for path in paths:
                results[str(path)] = verify(path, progress=progress)
        found = {path: dataclasses.asdict(verified) for path, verified in results.items()}
        self.report(found, lambda: _print_verified(results))
        return 0 if all(found.is_ok for found in results.values()) else BROKEN


@dataclasses.dataclass(frozen=True)
class Diff(Reporting):
    """Compare two checkpoints: names, shapes, dtypes, and the largest differences. Stacked and listed layers match.

    A and B may also be directories of safetensors, or PEFT adapters. Digests are not checked: use `jfsdp checkpoint
    verify`.

    For a run, the newest step is compared. Exit status: 0 no differences, 4 differences, 2 no checkpoint.
    """

    first: tyro.conf.Positional[
        Annotated[str, tyro.conf.arg(metavar="A", help="A checkpoint, or the directory of a run.")]
    ]
    second: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="B", help="The other one.")]]
    only: Globs = ()
    """Compare only arrays whose name matches one of these globs, or a prefix such as params."""

    def run(self) -> int:
        sources: list[Any] = [_open(path) for path in (self.first, self.second)]
        if self.only:
            sources = [subset(source, select_leaves("only", self.only, source.arrays, {})) for source in sources]
        total = sum(total_bytes(source.arrays.values()) for source in sources)
        with self.progress_of("comparing", 2 * STREAM_BYTES + 24 * PIECE_BYTES, total) as progress:
            found = diff(*(Watched(source, progress) for source in sources))
        self.report(dataclasses.asdict(found), lambda: _print_differences(found))
        return 0 if found.is_empty else BROKEN


@dataclasses.dataclass(frozen=True)
class Prune(Reporting):
    """Delete checkpoints of a run, except the newest and those that the other options keep.

    Missing options have the run's values. A run that is being written is not changed. Exit status: 0; 2 if PATH is not
    a run, or is in use.
    """

    path: tyro.conf.Positional[_OfRun]
    keep: Number = option(None, least=1)
    """Number of newest checkpoints to keep. none: the run's value, or 3 if the script did not write the checkpoints."""
    keep_every: Number = option(None, least=0)
    """Keep every step that is a multiple of N. none: the run's value. 0: no such step."""
    keep_best: Annotated[str | None, optional(str, "METRIC[:min|max[:N]]|off")] = None
    """Keep the best by a saved metric, such as eval_loss or eval_correct:max:2. none: the run's value. off: do not."""
    dry_run: bool = False
    """Print the steps to delete without deleting them."""

    def run(self) -> int:
        from jfsdp.checkpoint.manager import Checkpointer

        paths = find_checkpoints(self.path)
        if not paths[-1].name.isdigit() or paths[-1] == absolute_path(self.path):
            raise ValueError(f"checkpoint {self.path}: is one checkpoint; prune takes the directory of a run")
        stored = {"keep": 3, **read_config(paths[-1].parents[1]).get("config", {})}
        rules = {name: stored.get(name) for name in ("keep", "keep_every", "keep_best")}
        rules |= {name: value for name in rules if (value := getattr(self, name)) is not None}
        if rules["keep_best"] == "off":
            rules["keep_best"] = None
        keep, every, best = (value or None for value in rules.values())
        run = Checkpointer(paths[-1].parent, keep, keep_every=every, keep_best=best)
        sizes = {int(path.name): bytes_below(path) for path in paths}
        deleted = run.prune(dry_run=self.dry_run)
        run.close()
        freed, kept = sum(sizes[step] for step in deleted), [step for step in sizes if step not in deleted]
        text = f"{'would delete' if self.dry_run else 'deleted'} steps {_list(deleted)} ({freed:,} bytes)"
        found = {"deleted": deleted, "bytes": freed, "kept": kept, "is_dry_run": self.dry_run}
        self.report(found, lambda: print(f"{text}; kept {_list(kept)}"))
        return 0


_COMMANDS = (Inspect, Verify, Diff, Convert, Export, Import, Merge, Unmerge, Prune)
CHECKPOINT_COMMANDS = {kind.__name__.lower(): kind for kind in _COMMANDS}


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Inspect, verify, compare, convert, export, import and prune checkpoints."""


def _list(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) or "none"


def _open(path: str) -> Any:
    """Open a checkpoint, a PEFT adapter or Hugging Face weights as a source."""
    from jfsdp.checkpoint.foreign.pretrained import is_checkpoint

    place = as_path(path)
    if (place / CONFIG).is_file():
        return open_peft(place).source
    if not is_checkpoint(path) and place.is_dir() and any(file.suffix == ".safetensors" for file in place.iterdir()):
        return SafetensorsSource(place)
    return open_checkpoint(find_checkpoint(path), cache_bytes=STREAM_BYTES)


def _row(path: Path) -> dict[str, Any]:
    try:
        found = _describe(path) | {"problem": None}
    except ValueError as error:
        found = {"path": str(path), "bytes": bytes_below(path), "problem": str(error)}
    names = ("path", "bytes", "created", "metrics", "problem")
    return {"step": int(path.name)} | {name: found[name] for name in names if name in found}


def _print_steps(rows: list[dict[str, Any]]) -> None:
    table = make_table("step", "size", "written", "metrics", right=["step", "size"])
    for row in rows:
        metrics = row["problem"] or _show_metrics(row.get("metrics") or {})
        table.add_row(str(row["step"]), show_bytes(row["bytes"]), row.get("created") or "", metrics)
    make_console().print(table)


def _show_metrics(metrics: dict[str, float]) -> str:
    """Format losses, accuracies and other metrics of a job. Metrics of speed are only in --json."""
    hidden = re.compile(r".*_per_s.*|(data|host|step)_s|goodput|mfu.*|learning_rate|grad_norm|eval_(tokens|rows)")
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if not hidden.fullmatch(name))


def _describe(path: Path) -> dict[str, Any]:
    check_documents(path)
    manifest = read_manifest(path)
    return {"path": str(path), "bytes": bytes_below(path), **manifest}


def _print_checkpoint(found: dict[str, Any]) -> None:
    console = make_console()
    arrays = found["arrays"]
    facts = {"checkpoint": found["path"], "step": str(found.get("step")), "size": show_bytes(found["bytes"])}
    facts |= {name: _flat(found[name]) for name in ("created", "versions", "converted", "imported") if found.get(name)}
    facts |= {"metrics": shown} if (shown := _show_metrics(found.get("metrics") or {})) else {}
    if layout := found["layout"] or {}:
        mesh = ",".join(f"{axis}={size}" for axis, size in layout.get("mesh", {}).items() if size > 1) or "one device"
        facts["saved from"] = f"{layout.get('strategy')} on {mesh}"
    kinds = collections.Counter(Adapter.from_dict(one).kind for one in layout.get("adapters", ()))
    facts |= {"adapters": ", ".join(f"{kind}, of {num} arrays" for kind, num in kinds.items())} if kinds else {}
    if found["config"] is not None:
        stored = found["config"].get("config", found["config"]) if isinstance(found["config"], dict) else {}
        chosen = {name: stored[name] for name in ("model", "factory", "model_config") if stored.get(name)}
        facts["config"] = f"{_flat(chosen)} (--json prints all of it)"
    print_facts(console, facts)
    console.print()
    table = make_table("array", "shape", "dtype", "bytes", right=["bytes"])
    total = 0
    for name, entry in arrays.items():
        size = math.prod(entry["shape"]) * dtype(entry["dtype"]).itemsize
        total += size
        kind = f"{entry['dtype']} ({entry['key_impl']} key)" if entry["key_impl"] else entry["dtype"]
        table.add_row(name, " ".join(map(str, entry["shape"])) or "scalar", kind, f"{size:,}")
    console.print(table)
    console.print(f"{len(arrays)} arrays, {total:,} bytes")


def _flat(value: Any) -> str:
    return ", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else str(value)


def _print_verified(results: dict[str, Any]) -> None:
    console, bad = make_console(), sum(not found.is_ok for found in results.values())
    num = f"{len(results)} checkpoint{'s' * (len(results) > 1)}"
    print_verdict(console, not bad, "NOT OK" if bad else "OK", f"{bad} of {num}" if bad else num)
    for path, found in results.items():
        state = "ok" if found.is_ok else "DAMAGED" if found.is_damaged else "intact, but NOT FINITE"
        size = f"{found.num_arrays} arrays, {found.num_files} files, {found.num_bytes:,} bytes"
        print_wrapped(f"{path}: {state}; {size}")
        for line in [*found.problems, *(f"note: {remark}" for remark in found.remarks)]:
            print_wrapped(f"  {line}")


def _print_differences(found: Differences) -> None:
    console = make_console()
    for owner, names in (("A", found.only_first), ("B", found.only_second)):
        for name in names:
            console.print(f"only in {owner}: {name}")
    for name, one, two in found.kinds:
        console.print(f"{name}: A has {one}, B {two}")
    if found.values:
        table = make_table("array", "max |a-b|", "over max |a|", "elements", "at")
        for row in found.values:
            at = " ".join(map(str, row.at))
            table.add_row(row.name, f"{row.max_abs:.4g}", f"{row.max_rel:.4g}", f"{row.num_elements:,}", at)
        console.print(table)
    console.print(f"{found.num_equal} arrays are equal, {len(found.values)} differ in value")
