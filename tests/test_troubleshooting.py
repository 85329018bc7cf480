"""Every message of jfsdp that docs/troubleshooting.md quotes is in the source, so that the page stays true."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text().partition("\n## Messages of JAX")[0]
MESSAGES = re.findall(r"\*\*`(.+?)`\*\*", PAGE)


def constants() -> list[str]:
    """All texts of the source; of an f-string what is constant, with a blank where values stand."""
    found = []
    for path in [*(ROOT / "jfsdp").rglob("*.py"), ROOT / "scripts" / "train.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


TEXTS = constants()


def test_the_page_quotes_messages():
    assert len(MESSAGES) > 40


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_in_the_source(message):
    """Its constant parts occur in one text, in their order."""
    parts = message.split("...")
    likely = [text for text in TEXTS if all(part in text for part in parts)]
    assert any(re.search(".*?".join(map(re.escape, parts)), text, re.DOTALL) for text in likely)
