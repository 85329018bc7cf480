"""Configuration of the site that `make docs` builds: the README, docs/*.md, and the reference from docstrings."""

import pathlib
import re
from typing import Any

import jfsdp

ROOT = pathlib.Path(__file__).parent.parent

project = "jfsdp"
release = jfsdp.__version__
html_title = f"{project} {release}"
html_theme = "furo"
html_static_path, html_css_files = ["_static"], ["site.css"]
html_show_search_summary = False  # a page opened from the disk may not fetch others
html_copy_source = html_domain_indices = html_show_copyright = False
extensions = ["myst_parser", "sphinx_copybutton", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["log.md"]  # measurements: in the repository only
copybutton_prompt_text = "$ "

# Pages: the anchors of headings are GitHub's, and a fence without a language is plain text.
myst_heading_anchors = 4
highlight_language = "none"

# Docstrings: `name` is code, and a link where the reference has that name.
default_role = "py:obj"
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # Sphinx cannot read the repr of a function
python_maximum_signature_line_length = 80
napoleon_custom_sections = [("Attributes", "params_style")]


def to_code(found: re.Match) -> str:
    """Write Markdown's code as reST's: a plain name may be a link, all else is literal; letters after need a break."""
    code, after = found.groups()
    code = f"`{code}`" if re.fullmatch(r"[\w.]+", code) else f"``{code}``"
    return rf"{code}\ {after}" if after else code


def to_rest(_app, what, _name, _obj, _options, lines: list[str]) -> None:
    """Turn the sections that only jfsdp has into fields, which look like Args and Raises, and code into reST's."""
    text = re.sub(r"^(Layout|Dtype|Cost|Memory|Source): +", r"\n:\1: ", "\n".join(lines), flags=re.M)
    lines[:] = re.sub(r"`([^`]+)`(\w?)", to_code, text).split("\n")
    if what == "property":
        lines[:0] = ["..", ""]  # an empty comment: of a first line, napoleon takes what is before a colon for a type


def skip(_app, _what, _name, obj: Any, _skip, _options) -> bool | None:
    """Leave out what `NamedTuple` makes of its fields; the class tells them under Attributes."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def links_to_readme(_app, _name, source: list[str]) -> None:
    """Link to docs/index.md, which shows the README, and name the log, which is not on the site."""
    source[0] = re.sub(r"\[[^]]+\]\(log\.md\)", "`docs/log.md`", source[0].replace("](../README.md", "](index.md"))


def links_in_readme(_app, _path, _name, source: list[str]) -> None:
    """Rewrite links of the README for docs/index.md, one folder below."""

    def one_up(found: re.Match) -> str:
        return f"{found[1]}../{found[2]}" if (ROOT / found[2]).is_file() else found[0]

    text = source[0].replace("[CONTRIBUTING.md](CONTRIBUTING.md)", "[contributing](docs/contributing.md)")
    text = re.sub(r"^\[log\]: .*\n", "", text, flags=re.M).replace("[log]", "`docs/log.md`")
    source[0] = re.sub(r"(\]\(|^\[[^]]+\]: )([\w./-]+)", one_up, text, flags=re.M)


COMMAND = re.compile(
    r" {4}(\$ |[A-Z_]+=\S+ |#|(\.venv/bin/)?(pip|python|jfsdp|make|cp|export|srun|sbatch|git|tensorboard|torchrun)\b)"
)


def color_commands(_app, _name, source: list[str]) -> None:
    """Fence indented blocks that begin with a command, so that they are shown in colors."""
    blocks = re.split(r"(?<=\n\n)((?:^ {4}.*\n(?:\n(?= {4}))*)+)", source[0], flags=re.M)
    for place, block in enumerate(blocks):
        if place % 2 and COMMAND.match(block):
            language = "console" if block.startswith("    $ ") else "bash"
            text = re.sub(r"^ {4}", "", block, flags=re.M).rstrip("\n")
            blocks[place] = f"```{language}\n{text}\n```\n"
    source[0] = "".join(blocks)


def setup(app) -> None:
    app.connect("autodoc-process-docstring", to_rest, priority=400)  # before napoleon
    app.connect("autodoc-skip-member", skip)
    app.connect("source-read", links_to_readme)
    app.connect("source-read", color_commands)
    app.connect("include-read", links_in_readme)
