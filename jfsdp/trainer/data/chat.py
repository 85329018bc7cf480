"""Chat templates: conversations as text, and where in it the answers stand.

[Note: answers] What is trained of a conversation is what the model would have to write: the assistant's messages, each
up to the special token that ends it, and nothing of what follows (a newline before the next turn is the template's).
Where they stand is known in one of two ways:

- The template marks them, by `{% generation %}` as transformers does. A template that leaves its stop token out of the
  mark is read as if it stood inside: a model that never learns to stop is of no use.
- Else by prefixes: the conversation rendered up to an answer, with the prompt for it, must be a prefix of the whole
  rendering, as text and as tokens; and so must the conversation with it. What lies between is the answer. A template
  that rewrites history (drops the thoughts of earlier turns) breaks this, and is refused but for the last answer.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jfsdp.extras import load

Message = Mapping[str, Any]
Span = tuple[int, int]

# Noncharacters of Unicode, which no text holds: they stand around what a template marks, and are taken out again.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_MOST_CHARACTERS = 1 << 26
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class ChatTemplate:
    """A chat template in jinja, as tokenizers on Hugging Face come with one.

    Rendered in jinja2's sandbox: a template reads no files and no attributes of Python's, and it knows no clock
    (`strftime_now` is not defined), so that the same conversation is the same text every day. Its memory is bounded for
    products and powers only: one that doubles a text in a loop is not caught.

    Args:
      source: the template.
      name: where it is from, for messages.
      tokens: special tokens by the names that templates use, such as `bos_token`.

    Attributes:
      marks: whether it marks the assistant's words by `{% generation %}`.
      digest: of the template and its tokens.

    Raises:
      ValueError: if it is no jinja.
    """

    def __init__(self, source: str, name: str, tokens: Mapping[str, str]):
        self.name, self._tokens = name, dict(tokens)
        self.marks = re.search(r"{%-?\s*generation\s*-?%}", source) is not None
        self.digest = hashlib.blake2b(json.dumps([source, self._tokens]).encode(), digest_size=6).hexdigest()
        try:
            self._template = _environment().from_string(source)
        except load("jinja2").TemplateError as error:
            raise ValueError(f"chat template {name}: is no jinja ({error}); repair it, or name another") from error

    def render(self, messages: Sequence[Message], *, prompt: bool = False, tools: Any = None) -> tuple[str, list[Span]]:
        """Return a conversation as text, and which characters of it are marked as the assistant's.

        Args:
          prompt: end with what comes before an answer.
          tools: what the template is given under that name.

        Raises:
          ValueError: if the template fails, or writes without end.
        """
        given = {"messages": list(messages), "tools": tools, "add_generation_prompt": prompt, **self._tokens}
        parts, size = [], 0
        try:
            for part in self._template.generate(given):
                parts.append(part)
                size += len(part)
                if size > _MOST_CHARACTERS:
                    raise ValueError(f"it writes over {_MOST_CHARACTERS:,} characters for one conversation")
        # A template is a program: it may raise whatever Python does.
        except Exception as error:
            said = f"{type(error).__name__}: {error}".removeprefix("TemplateError: ")
            if "strftime_now" in said:
                said = "it asks for the date (strftime_now), and would make other tokens every day; write a date in it"
            raise ValueError(
                f"chat template {self.name} fails: {said}; repair it, or give another by --chat-template"
            ) from error
        return _without_marks("".join(parts))


def load_template(tokenizer: str, chat_template: str | None) -> ChatTemplate:
    """Return the chat template of a tokenizer.

    Args:
      tokenizer: directory, or file in it, where `tokenizer_config.json` lies; its special tokens are given to the
        template.
      chat_template: a file with the template; None: that of the tokenizer, in `chat_template.jinja` or
        `tokenizer_config.json`.

    Raises:
      ValueError: if there is none, it cannot be read, or is no jinja.
    """
    if tokenizer == "byte":
        raise ValueError(
            "the data are conversations, and the byte tokenizer has no special token that could end a turn; give one "
            "that has by --tokenizer PATH, or write prompt and completion instead of messages"
        )
    if (found := find_template(tokenizer, chat_template)) is None:
        raise ValueError(
            f"the data are conversations, and tokenizer {tokenizer!r} has no chat template (in tokenizer_config.json "
            "or chat_template.jinja); name a file with --chat-template, or write prompt and completion, not messages"
        )
    return found


def find_template(tokenizer: str, chat_template: str | None) -> ChatTemplate | None:
    """Return what `load_template` does; None: there is none.

    Raises:
      ValueError: if it cannot be read, or is no jinja.
    """
    if tokenizer == "byte":
        return None
    path = Path(tokenizer).expanduser()
    directory = path if path.is_dir() else path.parent
    stated = _read_config(directory / "tokenizer_config.json")
    tokens = {name: _token(stated[name]) for name in _SPECIAL if stated.get(name)}
    file = Path(chat_template).expanduser() if chat_template else directory / "chat_template.jinja"
    if chat_template or file.exists():
        try:
            return ChatTemplate(file.read_text(encoding="utf-8"), str(file), tokens)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"chat template {str(file)!r}: cannot be read ({error}); name a file of jinja") from error
    source = stated.get("chat_template")
    if isinstance(source, list):  # several by name
        source = {one.get("name"): one.get("template") for one in source}.get("default")
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, f"of {directory}", tokens)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        stated = json.loads(path.read_bytes()) if path.exists() else {}
    except ValueError as error:
        raise ValueError(f"{path}: is not JSON ({error}); take it anew from where the tokenizer is from") from error
    return stated if isinstance(stated, dict) else {}


def _token(stated: Any) -> str:
    return stated["content"] if isinstance(stated, dict) else str(stated)


def _without_marks(text: str) -> tuple[str, list[Span]]:
    spans, parts, length, begin = [], [], 0, 0
    for part in re.split(f"([{_BEGIN}{_END}])", text):
        if part == _BEGIN:
            begin = length
        elif part == _END:
            spans.append((begin, length))
        else:
            parts.append(part)
            length += len(part)
    return "".join(parts), [span for span in spans if span[0] < span[1]]


@functools.cache
def _environment() -> Any:
    """Return the jinja that transformers renders templates with, made anew: its options, filters and globals."""
    load("jinja2")
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %} .. {% endgeneration %}`."""

        tags = {"generation"}  # noqa: RUF012  (jinja2 wants it so)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
        """The sandbox, in which no product or power is larger than what a template may write."""

        intercepted_binops = frozenset(("*", "**"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if _size_of_product(operator, left, right) > _MOST_CHARACTERS:
                raise jinja2.exceptions.TemplateError(f"{operator} makes over {_MOST_CHARACTERS:,} characters")
            return super().call_binop(context, operator, left, right)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    return environment


def _size_of_product(operator: str, left: Any, right: Any) -> int:
    """Return the length of a sequence times a number, or the bits of a power."""
    if operator == "**":
        return left.bit_length() * abs(right) if isinstance(left, int) and isinstance(right, int) else 0
    count, of = (left, right) if isinstance(left, int) else (right, left)
    return len(of) * abs(count) if isinstance(count, int) and hasattr(of, "__len__") else 0
