"""Links of the README and the docs lead somewhere; the site has every page and every public name.

None of it needs what `make docs` installs.
"""

import collections
import inspect
import pathlib
import re

import pytest

import jfsdp
import jfsdp.plan
import jfsdp.testing
from tests.docs.pages import PAGES, ROOT


def prose(page: pathlib.Path) -> str:
    return re.sub(r"^( *```).*?^\1 *$", "", page.read_text(), flags=re.S | re.M)


def anchors(page: pathlib.Path) -> set[str]:
    """Those that GitHub makes of a page's headings, and so does the site."""
    seen = collections.Counter()
    for title in re.findall(r"^#+ +(.+?) *$", prose(page), re.M):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        seen[slug] += 1
        seen[f"{slug}-{seen[slug] - 1}"] += seen[slug] > 1
    return set(+seen)


def leads_somewhere(page: pathlib.Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return target.is_file() and (not anchor or anchor in anchors(target))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_are_there(page):
    links = re.findall(r"(?:\]\(|^\[[^]]+\]: )([^)\s]+)", re.sub(r"`[^`]*`", "", prose(page)), re.M)
    relative = [link for link in links if not re.match(r"\w+:", link)]
    assert [link for link in relative if not leads_somewhere(page, link)] == []


def test_the_site_lists_every_page():
    docs = ROOT / "docs"
    listed = re.findall(r"^(?:.* <)?([\w/-]+)>?$", (docs / "index.md").read_text(), re.M)
    assert len(listed) <= 30
    for page, folder in ((docs / "project.rst", ""), (docs / "reference" / "index.rst", "reference/")):
        entries = re.findall(r"^   (?:.* <)?([/\w-]+)>?$", page.read_text(), re.M)
        listed += [entry[1:] if entry.startswith("/") else folder + entry for entry in entries]
    pages = [page for ending in ("*.md", "*.rst") for page in docs.rglob(ending)]
    names = {page.relative_to(docs).with_suffix("").as_posix() for page in pages}
    assert sorted(listed) == sorted(names - {"index", "log"} | {"self"})


def test_the_reference_has_every_public_name_once():
    pages = [page.read_text() for page in (ROOT / "docs" / "reference").glob("*.rst")]
    listed = re.findall(r"^\.\. (?:autofunction|autoclass|py:data):: jfsdp\.(\S+)$", "\n".join(pages), re.M)
    spaces = (jfsdp.checkpoint, jfsdp.optim, jfsdp.peft, jfsdp.plan, jfsdp.trainer)
    spaced = [f"{space.__name__.removeprefix('jfsdp.')}.{name}" for space in spaces for name in space.__all__]
    own = [value for value in vars(jfsdp.testing).values() if inspect.getmodule(value) is jfsdp.testing]
    testing = [f"testing.{value.__name__}" for value in own if not value.__name__.startswith("_")]
    assert sorted(listed) == sorted([*jfsdp.__all__, *spaced, *testing])
