"""Plan again what the pages of docs/ show, and write the figures into them: `python scripts/refresh_figures.py`.

`docs/figures.toml` lists the tables, sentences and outputs of the pages, and the plans that their figures come from.
This script runs those plans (`jfsdp plan --json`, about ten seconds of one core each), writes what the pages need to
`docs/figures.json`, with the commit and the version of JAX, and replaces the figures in the pages. tests/docs compares
the pages with that file. Nothing else in a page is changed.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import tyro

from jfsdp.plan import find_gpu
from jfsdp.plan.memory.peak import RESERVE_BYTES
from jfsdp.trainer.help_groups import Options, option

ROOT = Path(__file__).parent.parent
DOCS, FIGURES = ROOT / "docs", ROOT / "docs" / "figures.json"
GIB, GB = 2**30, 1e9
SMALLEST = {"24": "rtx4090", "48": "l40s", "80": "h100", "141": "h200"}

Figures = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class RefreshOptions(Options):
    """Options: the plans to run again."""

    page: str = ""
    """Only the plans of this page, such as adapters.md. Empty: all."""
    missing: bool = False
    """Only plans that docs/figures.json does not have. Their tables name the commit of this run."""
    clock: Path | None = None
    """The file of `scripts/fit_clock.py --json FILE`: the errors of the clock on published runs."""
    jobs: int = option(2, least=1)
    """How many plans run at a time."""


def main(argv: Sequence[str]) -> int:
    """Plan, write the file and the pages; return 1 if a command failed, and 2 for a page without figures."""
    options = tyro.cli(RefreshOptions, args=list(argv), prog="refresh_figures.py", description=__doc__)
    places, figures = read_places(), json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    pages = list(dict.fromkeys(place["page"] for place in places))
    if options.page and options.page not in pages:
        print(
            f"--page {options.page}: docs/figures.toml has no figures of it; it has {', '.join(pages)}", file=sys.stderr
        )
        return 2
    chosen = [place for place in places if options.page in ("", place["page"])]
    known = {"plans": {}, "outputs": {}, "clock": {}} | figures
    wanted = dict.fromkeys(command for place in chosen for command in plans_of(place))
    outputs = {_name(place): place for place in chosen if "commands" in place}
    if options.missing:
        wanted = [command for command in wanted if command not in known["plans"]]
        outputs = {name: place for name, place in outputs.items() if name not in known["outputs"]}
    if options.clock:
        known["clock"] = json.loads(options.clock.read_text())
    made = _made()
    with ThreadPoolExecutor(options.jobs) as pool:
        planned = zip(wanted, pool.map(_plan, wanted), strict=True)
        known["plans"] |= {command: found | made for command, found in planned if found}
        printed = zip(outputs, pool.map(_print, outputs.values()), strict=True)
        known["outputs"] |= {name: {"printed": found} | made for name, found in printed if found}
    used = {
        "plans": sorted({command for place in places for command in plans_of(place)}),
        "outputs": [_name(place) for place in places if "commands" in place],
    }
    for kind, names in used.items():
        known[kind] = {name: known[kind][name] for name in names if name in known[kind]}
    FIGURES.write_text(_one_line_each(known))
    if failed := [name for kind, names in used.items() for name in names if name not in known[kind]]:
        print("failed:", *failed, sep="\n  ", file=sys.stderr)
        return 1
    for page in pages:
        path = DOCS / page
        path.write_text(refreshed(path.read_text(), [one for one in places if one["page"] == page], known))
    return 0


def read_places() -> list[dict[str, Any]]:
    """Return the tables, sentences and outputs of docs/figures.toml, each with its page."""
    found = tomllib.loads((DOCS / "figures.toml").read_text())
    return [place for kind in ("table", "text", "output") for place in found[kind]]


def plans_of(place: Mapping[str, Any]) -> list[str]:
    """Return the options of every plan that a table or a sentence takes figures from."""
    if "rows" in place:
        return [cell for _, row in _cells(place) for cell, _ in row]
    return list(place.get("plans", {}).values())


def refreshed(text: str, places: Sequence[Mapping[str, Any]], figures: Figures) -> str:
    """Return a page with the figures in place of those that it has.

    Raises:
        ValueError: a table, sentence or output is not in the page, or is there twice.
    """
    for place in places:
        change = _table if "rows" in place else _output if "commands" in place else _sentence
        text = change(text, place, figures)
    return text


def _plan(command: str) -> Figures | None:
    """Run one plan; None if it failed."""
    found = _run(["jfsdp", "plan", *shlex.split(command), "--json"], ROOT / "examples")
    if found is None:
        return None
    kept = _kept(json.loads(found))
    return {name: round(value, 5) if isinstance(value, float) else value for name, value in kept.items()}


def _run(words: Sequence[str], directory: str | Path) -> str | None:
    """Run a command of jfsdp or a script, and return what it prints; None, with its errors on stderr, if it failed.

    Status 3 of a step that does not fit, and 4 of an audit with findings, are answers too.
    """
    program, *rest = words
    python = [sys.executable, *(["-m", program] if program == "jfsdp" else [str(ROOT / program)])]
    done = subprocess.run([*python, *rest], cwd=directory, capture_output=True, text=True, env=_environment())
    print(f"{done.returncode} {shlex.join(words)}", flush=True)
    if done.returncode not in (0, 3, 4):
        print(done.stderr[-2000:], file=sys.stderr)
        return None
    return done.stdout


def _kept(found: Figures) -> Figures:
    """Return what pages show of a plan: GiB, GB, seconds, items per second and GPU."""
    kept = {"fits": found["fits"], "GiB": found["needed_bytes"] / GIB, "limit": found["limit_bytes"] / GIB}
    if token := found.get("token"):  # of --inference
        sizes = {name: found[f"{name}_bytes"] / GIB for name in ("cache", "weight")}
        return kept | sizes | {"token": token["needed_bytes"] / GIB, "token_s": token["seconds"]}
    rate = next((value for name, value in found.items() if name.endswith("_per_s_per_gpu")), 0)
    across = sum(row["measured_bytes"] for row in found["collectives"] if row["crosses_nodes"])
    return kept | {
        "host": found["memory"]["host"] / GIB,
        **{part: found["memory"][part] / GIB for part in ("activations", "gathered", "gradients", "compute")},
        "sent": found["wire_bytes"] / GB,
        "across": across / GB,
        "step": found["step_s"],
        **{name.removesuffix("_s"): seconds for name, seconds in found["critical"].items()},
        "wire": found["wire_s"],
        "rate": rate,
        "mfu": found["mfu"],
        "peak": found["mfu_causal"] and found["mfu_causal"] * found["step_s"],
    }


def _print(output: Mapping[str, Any]) -> list[list[str]] | None:
    """Run commands one after the other in an empty directory; return the lines that each prints; None if one failed."""
    before = output.get("before", [])
    with tempfile.TemporaryDirectory() as directory:
        printed = [_run(shlex.split(output.get("runs", one)), directory) for one in [*before, *output["commands"]]]
    if None in printed:
        return None
    texts = [text.replace(f"{ROOT}/", "").strip("\n") for text in printed[len(before) :] if text is not None]
    return [[line.rstrip() for line in text.splitlines()] for text in texts]


def _name(output: Mapping[str, Any]) -> str:
    return " && ".join(output["commands"])


def _environment() -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "models"), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"JAX_PLATFORMS": "cpu", "COLUMNS": "80", "PYTHONPATH": paths.rstrip(os.pathsep)}


def _made() -> dict[str, str]:
    """Say what the figures are planned with: the last commit that changed the package or the models, and JAX."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words, "--", "jfsdp", "models"], cwd=ROOT, capture_output=True, check=True)
        return done.stdout.decode().strip()

    commit = git("log", "-1", "--abbrev=7", "--format=%h") + " with changes" * bool(git("status", "--porcelain"))
    return {"commit": commit, "jax": jax.__version__, "date": datetime.date.today().isoformat()}


def _one_line_each(figures: Figures) -> str:
    """JSON with a line for each plan, so that a change of one is a change of one line."""
    parts = []
    for kind, entries in figures.items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
        parts.append(f'"{kind}": {{\n{lines}\n}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _cells(table: Mapping[str, Any]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the label of each row, and for each column the options of its plan and what is shown of it."""
    for label, options in table["rows"]:
        columns = ([*column, ""][:3] for column in table["columns"])
        yield label, [(" ".join(f"{table['options']} {options} {own}".split()), shown) for _, shown, own in columns]


def _table(text: str, table: Mapping[str, Any], figures: Figures) -> str:
    """Replace the rows of the table with these headings, and the line about its plans below it."""
    heads = [table["first"], *(column[0] for column in table["columns"])]
    head, rule = f"| {' | '.join(heads)} |", "|---" * (table["first"].count("|") + len(heads)) + "|"
    rows, made = [], set()
    for label, cells in _cells(table):
        plans = [figures["plans"][command] for command, _ in cells]
        shown = [SHOWN[name](plan) for plan, (_, name) in zip(plans, cells, strict=True)]
        rows.append(f"| {label} | {' | '.join(shown)} |")
        made |= {f"{plan['commit']} (JAX {plan['jax']}, {plan['date']})" for plan in plans}
    below = f"Planned at {', '.join(sorted(made))}."
    new = "\n".join([head, rule, *rows, "", below])
    pattern = re.escape(f"{head}\n") + r"(\|.*\n)+(\nPlanned at [^\n]*)?"
    return _replace(text, pattern, lambda found: new if found[2] else f"{new}\n", f"the table {head!r}")


def _sentence(text: str, sentence: Mapping[str, Any], figures: Figures) -> str:
    """Replace the figures of a sentence, and leave its line breaks as they are."""
    words = re.split(r"\{(.*?)\}", sentence["text"])
    values = []
    for placeholder in words[1::2]:
        name, shown = placeholder.split(".", 1)
        of_clock = name == "clock"
        values.append(figures[name][shown] if of_clock else SHOWN[shown](figures["plans"][sentence["plans"][name]]))
    around = [re.sub(r"(\\\s)+", r"\\s+", re.escape(word)) for word in words[0::2]]
    pattern = "".join(f"({part})" + r"[\d.,]+" * (number < len(values)) for number, part in enumerate(around))

    def fill(found: re.Match[str]) -> str:
        return "".join(part + value for part, value in zip(found.groups(), [*values, ""], strict=True))

    return _replace(text, pattern, fill, f"the sentence {sentence['text']!r}")


def _output(text: str, output: Mapping[str, Any], figures: Figures) -> str:
    """Replace what is printed below each command, an indented block that begins with `$`."""
    printed = figures["outputs"][_name(output)]["printed"]
    wanted = re.compile("|".join(output.get("lines", ["^.*$"])), re.M)
    for command, lines in zip(output["commands"], printed, strict=True):
        lines = [line for found in wanted.finditer("\n".join(lines)) for line in found[0].split("\n")]
        shown = "".join(f"    {line}".rstrip() + "\n" for line in lines)
        pattern = rf"(    \$ {re.escape(command)}\n)((    [^$].*)?\n)*?(?=\S|    \$)"
        text = _replace(text, pattern, lambda found, new=shown: f"{found[1]}{new}\n", f"the output of {command!r}")
    return text


def _replace(text: str, pattern: str, new: Any, what: str) -> str:
    text, times = re.subn(pattern, new, text)
    if times != 1:
        raise ValueError(f"{what} is in the page {times} times, where once is expected: change docs/figures.toml too.")
    return text


def _fit(plan: Figures) -> str:
    """The GiB that a step needs, and the smallest GPU, by the GB printed on it, that has them."""
    limits = {name: find_gpu(gpu).memory_bytes - RESERVE_BYTES for name, gpu in SMALLEST.items()}
    fits = next((f"**{name}**" for name, limit in limits.items() if plan["GiB"] * GIB <= limit), "none")
    return f"{plan['GiB']:.{1 if plan['GiB'] < 200 else 0}f}: {fits}"


SHOWN: dict[str, Any] = {
    "needs": lambda plan: f"{plan['GiB']:.2f}" + ", does not fit" * (not plan["fits"]),
    "fit": _fit,
    **{
        name: lambda plan, name=name: f"{plan[name]:.2f}"
        for name in ("limit", "host", "activations", "gathered", "gradients", "compute")
    },
    **{name: lambda plan, name=name: f"{plan[name]:.1f}" for name in ("sent", "across")},
    "weights": lambda plan: f"{plan['weight']:.2f}",
    "cache": lambda plan: f"{plan['cache']:.2f}",
    "token_needs": lambda plan: f"{plan['token']:.2f}",
    "token_ms": lambda plan: f"{plan['token_s'] * 1000:.1f}",
    **{
        name: lambda plan, name=name: f"{plan[name]:.3f}"
        for name in ("step", "matmul", "attention", "memory", "slowdown", "exposed", "host_exposed", "wire", "peak")
    },
    "waits": lambda plan: f"{plan['exposed'] + plan['host_exposed']:.3f}",
    "waiting": lambda plan: f"{(plan['exposed'] + plan['host_exposed']) / plan['step']:.1%}",
    "attention_share": lambda plan: f"{plan['attention'] / plan['step']:.0%}",
    "memory_share": lambda plan: f"{plan['memory'] / plan['step']:.0%}",
    "rate": lambda plan: f"{plan['rate']:,.0f}",
    "mfu": lambda plan: f"{plan['mfu']:.1%}",
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
