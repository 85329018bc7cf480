"""The figures of the pages are those of docs/figures.json, which scripts/refresh_figures.py writes."""

import json
import re

import pytest

from scripts.refresh_figures import DOCS, FIGURES, plans_of, read_places, refreshed

PLACES = read_places()
KEPT = json.loads(FIGURES.read_text())
PAGES = sorted({place["page"] for place in PLACES})


def places(page):
    return [place for place in PLACES if place["page"] == page]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_the_figures_of_the_file(page):
    text = (DOCS / page).read_text()
    assert refreshed(text, places(page), KEPT) == text


def test_the_file_has_the_plans_of_the_pages_and_no_others():
    assert {command for place in PLACES for command in plans_of(place)} == KEPT["plans"].keys()
    assert all(entry["commit"] and entry["jax"] for kind in ("plans", "outputs") for entry in KEPT[kind].values())


@pytest.mark.parametrize("page", ["performance.md", "plan.md", "adapters.md"])
def test_no_table_has_figures_from_elsewhere(page):
    measured = re.search(r"measured = \[\n(.*?)\n\]", (DOCS / "figures.toml").read_text(), re.S)
    assert measured
    found = re.findall(r"((?:^\|.*\n)+)(\nPlanned at)?", (DOCS / page).read_text(), re.M)
    figure = re.compile(r"\| \**\d[\d,]*\.\d")
    others = [table.partition("\n")[0] for table, planned in found if not planned and figure.search(table)]
    assert [head for head in others if head not in measured[1]] == []


def test_a_stale_figure_is_replaced_and_nothing_else():
    text = (DOCS / "adapters.md").read_text()
    stale = re.sub(r"needs [\d.]+ of", "needs 1.00 of", text.replace("| 1B | LoRA | ", "| 1B | LoRA | 9.9: none | "))
    assert stale.count("9.9: none") == 1 and "needs 1.00 of" in stale
    assert refreshed(stale, places("adapters.md"), KEPT) == text


def test_a_sentence_that_was_changed_alone_is_an_error():
    text = (DOCS / "adapters.md").read_text().replace("of pinned host memory", "of host memory")
    with pytest.raises(ValueError, match="times, where once"):
        refreshed(text, places("adapters.md"), KEPT)
