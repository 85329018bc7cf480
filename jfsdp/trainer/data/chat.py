"""Chat templates: rendering of conversations, and positions of the answers in the text.

[Note: answers] The trained tokens of a conversation are those that the model has to write: the assistant's messages,
each up to and including its stop token. Text after that belongs to the template, such as a newline before the next
turn. Answers are located in one of two ways:

- The template marks them with `{% generation %}`, as in transformers. If the stop token follows the mark, it is trained
  too, so that the model learns to stop.
- Otherwise by prefixes. The conversation up to an answer, rendered with its generation prompt, must be a prefix of the
  whole rendering, as text and as tokens. So must the conversation including the answer. The difference is the answer. A
  template that rewrites history (drops the thoughts of earlier turns) is accepted for the last answer only.
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
from jfsdp.objects.path import as_path
from jfsdp.trainer.data.messages import OWN, Message
from jfsdp.trainer.data.tokenizer import read_config, read_special_tokens

Span = tuple[int, int]

# Unicode noncharacters, which no text contains. They delimit the marked parts, and are removed from the result.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_MOST_CHARACTERS = 1 << 26


class ChatTemplate:
    """A jinja chat template of a Hugging Face tokenizer.

    It is rendered in jinja2's sandbox, without access to files and Python attributes. `strftime_now` is not defined, so
    that the text does not depend on the date. Memory is bounded only for products and powers, not for loops that double
    a text.

    Args:
      source: the template.
      name: origin, for messages.
      tokens: special tokens by their names in templates, such as `bos_token`.
      for_tools: template for conversations with tools; None: this one.

    Attributes:
      marks: whether it marks answers with `{% generation %}`.
      digest: hash of the template and its tokens.

    Raises:
      ValueError: if it is not valid jinja.
    """

    def __init__(self, source: str, name: str, tokens: Mapping[str, str], for_tools: ChatTemplate | None = None):
        self.name, self._tokens, self._source, self._for_tools = name, dict(tokens), source, for_tools
        self.marks = re.search(r"{%-?\s*generation\s*-?%}", source) is not None
        content = [source, self._tokens, *([for_tools.digest] if for_tools else [])]
        self.digest = hashlib.blake2b(json.dumps(content).encode(), digest_size=6).hexdigest()
        try:
            self._template = _environment().from_string(source)
        except load("jinja2").TemplateError as error:
            raise ValueError(f"chat template {name} is not valid jinja ({error}); repair it or name another") from error

    def given(self, tools: Any) -> ChatTemplate:
        """Return the template for a conversation with these tools (None: without), chosen as in transformers."""
        return self if tools is None or self._for_tools is None else self._for_tools

    def unnamed(self, messages: Sequence[Message]) -> set[str]:
        """Return the fields of messages that the template does not mention, and so does not render."""
        return {name for one in messages for name in one if name not in OWN and not self.mentions(name)}

    def mentions(self, word: str) -> bool:
        """Return whether the source has a word."""
        return re.search(rf"\b{re.escape(word)}\b", self._source) is not None

    @functools.cached_property
    def takes_text(self) -> bool:
        """Whether arguments of calls must be JSON text, because the template does not render objects as JSON.

        True for templates of DeepSeek and InternLM. Most others pass objects to the filter `tojson`.
        """

        def is_written(arguments: Any) -> bool:
            call = {"id": "a23456789", "type": "function", "function": {"name": "f", "arguments": arguments}}
            answer = {"role": "assistant", "content": "", "tool_calls": [call]}
            with contextlib.suppress(ValueError):
                return '{"a": 1}' in self.render([{"role": "user", "content": "b"}, answer])[0]
            return False

        return is_written('{"a": 1}') and not is_written({"a": 1})

    def render(self, messages: Sequence[Message], *, prompt: bool = False, tools: Any = None) -> tuple[str, list[Span]]:
        """Return a conversation as text, and the spans of characters marked as the assistant's.

        Args:
          prompt: whether to add the generation prompt.
          tools: tools passed to the template.

        Raises:
          ValueError: if the template fails, or its text exceeds the limit.
        """
        given = {"messages": list(messages), "tools": tools, "add_generation_prompt": prompt, **self._tokens}
        parts, size = [], 0
        try:
            for part in self._template.generate(given):
                parts.append(part)
                size += len(part)
                if size > _MOST_CHARACTERS:
                    raise ValueError(f"it writes over {_MOST_CHARACTERS:,} characters for one conversation")
        except Exception as error:  # a template is a program, which may raise any exception
            reason = f"{type(error).__name__}: {error}".removeprefix("TemplateError: ")
            if "strftime_now" in reason:
                reason = "it needs the date (strftime_now), so tokens would change every day; write a date into it"
            raise ValueError(
                f"chat template {self.name} fails: {reason}; repair it, or give another by --chat-template"
            ) from error
        return _without_marks("".join(parts))


def load_template(tokenizer: str, chat_template: str | None) -> ChatTemplate:
    """Return the chat template of a tokenizer.

    Args:
      tokenizer: directory of `tokenizer_config.json`, or a file in it. Its special tokens are passed to the template.
      chat_template: file of the template, or the name of one of the tokenizer's; None: the tokenizer's, from
        `chat_template.jinja` or `tokenizer_config.json`. Of several, "default" is used, and "tool_use" for
        conversations with tools.

    Raises:
      ValueError: if there is none, it cannot be read, or is not valid jinja.
    """
    if tokenizer == "byte":
        raise ValueError(
            "the data are conversations, but the byte tokenizer has no special token to end a turn; give another by "
            "--tokenizer PATH, or write prompt and completion instead of messages"
        )
    if (found := find_template(tokenizer, chat_template)) is None:
        raise ValueError(
            f"the data are conversations, but tokenizer {tokenizer!r} has no chat template (in tokenizer_config.json "
            "or chat_template.jinja); name a file with --chat-template, or write prompt and completion, not messages"
        )
    return found


def find_template(tokenizer: str, chat_template: str | None) -> ChatTemplate | None:
    """Return the template of `load_template`, or None if there is none.

    Raises:
      ValueError: if it cannot be read, or is not valid jinja.
    """
    if tokenizer == "byte":
        return None
    path = as_path(tokenizer)
    directory = path if path.is_dir() else path.parent
    tokens, origin = read_special_tokens(directory), f"of {directory}"
    named = _read_templates(directory)
    if chat_template in named:
        named = {"default": named[chat_template]}
    elif chat_template:
        named, origin = {"default": _read_source(as_path(chat_template))}, chat_template
    if not named:
        return None
    if "default" not in named:
        raise ValueError(
            f"tokenizer {tokenizer!r} has the chat templates {', '.join(sorted(named))}, but no default; name one of "
            "them with --chat-template"
        )
    for_tools = ChatTemplate(named["tool_use"], f"tool_use {origin}", tokens) if "tool_use" in named else None
    return ChatTemplate(named["default"], origin, tokens, for_tools)


def _read_templates(directory: Path) -> dict[str, str]:
    """Return the templates of a tokenizer by name, from its files or else from its configuration."""
    files = {"default": directory / "chat_template.jinja"}
    files |= {file.stem: file for file in (directory / "additional_chat_templates").glob("*.jinja")}
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
    """Return a jinja environment with the options, filters and globals of transformers."""
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
        """A sandbox that limits the size of products and powers."""

        intercepted_binops = frozenset(("*", "**"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if _size_of_product(operator, left, right) > _MOST_CHARACTERS:
                raise jinja2.exceptions.TemplateError(f"{operator} gives over {_MOST_CHARACTERS:,} characters")
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
