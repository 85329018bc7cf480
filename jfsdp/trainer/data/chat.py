"""Chat templates: conversations as text, and where in it the answers stand.

[Note: answers] What is trained of a conversation is what the model would have to write: the assistant's messages, each
up to the special token that ends it, and nothing of what follows (a newline before the next turn is the template's).
Where they stand is known in one of two ways:

- The template marks them, by `{% generation %}` as transformers does. A template that leaves its stop token out of the
  mark is read as if it was inside: a model that never learns to stop is of no use.
- Else by prefixes: the conversation rendered up to an answer, with the prompt for it, must be a prefix of the whole
  rendering, as text and as tokens; and so must the conversation with it. What lies between is the answer. A template
  that rewrites history (drops the thoughts of earlier turns) breaks this, and is refused but for the last answer.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jfsdp.extras import load
from jfsdp.trainer.data.messages import OWN, Message
from jfsdp.trainer.data.tokenizer import read_config, read_special_tokens

Span = tuple[int, int]

# Noncharacters of Unicode, which no text holds: they stand around what a template marks, and are taken out again.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_MOST_CHARACTERS = 1 << 26


class ChatTemplate:
    """A chat template in jinja, as tokenizers on Hugging Face come with one.

    Rendered in jinja2's sandbox: a template reads no files and no attributes of Python's, and it knows no clock
    (`strftime_now` is not defined), so that the same conversation is the same text every day. Its memory is bounded for
    products and powers only: one that doubles a text in a loop is not caught.

    Args:
      source: the template.
      name: where it is from, for messages.
      tokens: special tokens by the names that templates use, such as `bos_token`.
      for_tools: the template of conversations with tools; None: this one.

    Attributes:
      marks: whether it marks the assistant's words by `{% generation %}`.
      digest: of the template and its tokens.

    Raises:
      ValueError: if it is no jinja.
    """

    def __init__(self, source: str, name: str, tokens: Mapping[str, str], for_tools: ChatTemplate | None = None):
        self.name, self._tokens, self._source, self._for_tools = name, dict(tokens), source, for_tools
        self.marks = re.search(r"{%-?\s*generation\s*-?%}", source) is not None
        content = [source, self._tokens, *([for_tools.digest] if for_tools else [])]
        self.digest = hashlib.blake2b(json.dumps(content).encode(), digest_size=6).hexdigest()
        try:
            self._template = _environment().from_string(source)
        except load("jinja2").TemplateError as error:
            raise ValueError(f"chat template {name}: is no jinja ({error}); repair it, or name another") from error

    def given(self, tools: Any) -> ChatTemplate:
        """Return the template of a conversation with these tools, or without (None), as transformers chooses it."""
        return self if tools is None or self._for_tools is None else self._for_tools

    def unnamed(self, messages: Sequence[Message]) -> set[str]:
        """Return the fields of messages whose names the template does not have, and so does not write."""
        fields = {name for one in messages for name in one} - OWN
        return {name for name in fields if not re.search(rf"\b{re.escape(name)}\b", self._source)}

    @functools.cached_property
    def takes_text(self) -> bool:
        """Whether arguments of calls have to be JSON text: the template writes text unchanged, and objects not as JSON.

        DeepSeek's templates and InternLM's are such; most others pass objects to the filter `tojson`.
        """

        def is_written(arguments: Any) -> bool:
            call = {"id": "a23456789", "type": "function", "function": {"name": "f", "arguments": arguments}}
            answer = {"role": "assistant", "content": "", "tool_calls": [call]}
            with contextlib.suppress(ValueError):
                return '{"a": 1}' in self.render([{"role": "user", "content": "b"}, answer])[0]
            return False

        return is_written('{"a": 1}') and not is_written({"a": 1})

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
      chat_template: a file with the template, or the name of one of the tokenizer's; None: the tokenizer's, in
        `chat_template.jinja` or `tokenizer_config.json`. Of several by name these are "tool_use" for conversations with
        tools, if there is one, and "default".

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
    tokens, origin = read_special_tokens(directory), f"of {directory}"
    named = _read_templates(directory)
    if chat_template in named:
        named = {"default": named[chat_template]}
    elif chat_template:
        named, origin = {"default": _read_source(Path(chat_template).expanduser())}, chat_template
    if not named:
        return None
    if "default" not in named:
        raise ValueError(
            f"tokenizer {tokenizer!r} has the chat templates {', '.join(sorted(named))}, and none is its default; name "
            "one of them with --chat-template"
        )
    for_tools = ChatTemplate(named["tool_use"], f"tool_use {origin}", tokens) if "tool_use" in named else None
    return ChatTemplate(named["default"], origin, tokens, for_tools)


def _read_templates(directory: Path) -> dict[str, str]:
    """Return the templates of a tokenizer by name: those in files, or else those in its configuration."""
    files = {"default": directory / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if any(file.exists() for file in files.values()):
        return {name: _read_source(file) for name, file in files.items() if file.exists()}
    source = read_config(directory).get("chat_template")
    named = {one["name"]: one["template"] for one in source} if isinstance(source, list) else {"default": source}
    return {name: text for name, text in named.items() if isinstance(text, str)}


def _read_source(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"chat template {str(file)!r}: cannot be read ({error}); name a file of jinja") from error


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
    return "".join(parts), spans


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
