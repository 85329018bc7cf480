"""Write the tables of docs/options.md: `python docs/make_options.py`.

They are made of the fields of `TrainConfig`, and the column Python of options_in_python.toml.

A table is what is between its heading line (`| option |`, `| another value of |`) and the next empty line; the rest of
the page is written manually.
"""

import dataclasses
import pathlib
import re
import tomllib

from jfsdp.trainer.help_groups import groups_of, help_of
from jfsdp.trainer.parse import write
from jfsdp.trainer.run.config import TrainConfig
from jfsdp.trainer.run.resume_rules import RULES, options_of

PAGE = pathlib.Path(__file__).with_name("options.md")
FIELDS = {field.name: field for field in dataclasses.fields(TrainConfig)}
HELP = help_of(TrainConfig)
PYTHON = tomllib.loads(PAGE.with_name("options_in_python.toml").read_text(encoding="utf-8"))


def render(page: str) -> str:
    """Return the page with today's tables."""
    head, *parts = re.split(r"^(?=## )", page.partition("## What a resumed run")[0], flags=re.M)
    by_title = {part[3:].partition("\n")[0]: part for part in parts}
    resume = page[page.index("## What a resumed run") :]
    groups = {title[0].upper() + title[1:]: names for title, names in groups_of(TrainConfig).items()}
    parts = [_with_table(by_title[title], _options(names)) for title, names in groups.items()]
    return head + "".join(parts) + _with_table(resume, _rules())


def _with_table(part: str, table: str) -> str:
    found = re.search(r"^\| (option|another value of) \|.*?\n(?=\n|\Z)", part, flags=re.M | re.S)
    assert found, f"no table: {part[:60]!r}"
    return part[: found.start()] + table + part[found.end() :]


def _options(names: list[str]) -> str:
    rows = "".join(f"| `{_spell(name)}` | `{_default(name)}` | {_help(name)} | {_python(name)}|\n" for name in names)
    return f"| option | default | what it does | Python |\n|---|---|---|---|\n{rows}"


def _rules() -> str:
    rows = [
        f"| {', '.join(f'`{_spell(name)}`' for name in options_of(rule))} | {goes} | {_left_out(rule)} |\n"
        for rule, goes in RULES.items()
    ]
    return f"| another value of | with `--resume` | left out |\n|---|---|---|\n{''.join(rows)}"


def _left_out(rule: str) -> str:
    return "the run's value" if rule.endswith("kept") else "default"


def _python(name: str) -> str:
    return f"{PYTHON[name]} " if name in PYTHON else ""


def _spell(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _default(name: str) -> str:
    default = FIELDS[name].default
    if isinstance(default, bool | float):
        return f"{default:g}" if isinstance(default, float) else "on" if default else "off"
    return {(): "-", "": '""'}.get(default, write(default))


def _help(name: str) -> str:
    """Return the help in Markdown: options and globs as code, but where it is code already."""
    parts = " ".join(str(HELP[name]).split()).removesuffix(".").split("`")
    for number, text in enumerate(parts):
        parts[number] = (
            f"`{text}`" if number % 2 else re.sub(r"--[a-z][a-z-]+|[^\s,(]*[*_][^\s,;)]*[^\s,;.:)]", r"`\g<0>`", text)
        )
    return "".join(parts).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
