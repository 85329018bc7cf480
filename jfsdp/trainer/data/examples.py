"""Records as tokens of which some are trained: conversations, prompts with completions, choices between answers."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jfsdp.trainer.data.chat import ChatTemplate
from jfsdp.trainer.data.conversation import Conversation
from jfsdp.trainer.data.messages import (
    Message,
    is_trained,
    read_alpaca,
    read_messages,
    read_sharegpt,
    read_tools,
    texts_of,
    with_arguments,
)
from jfsdp.trainer.data.records import READ, Record
from jfsdp.trainer.data.tokenizer import Tokenizer

ANSWERS = ("all", "last")
# Form -> the messages of a record that is one conversation.
_CONVERSATIONS: dict[str, Callable[[Record], Any]] = {
    "messages": operator.itemgetter("messages"),
    "sharegpt": read_sharegpt,
    "alpaca": read_alpaca,
}


class Example(NamedTuple):
    """One row or part of a row.

    Attributes:
      tokens: ids, int32 [n + 1]: the last one is only a target, the first only an input.
      trained: whether a token is to be predicted, bool [n + 1].
      num_tokens: tokens before it was cut.
      num_cut: trained tokens that were cut off.
    """

    tokens: np.ndarray
    trained: np.ndarray
    num_tokens: int
    num_cut: int


class Examples:
    """Turns records of one form into examples.

    Args:
      tokenizer: for the text.
      load: returns the template of conversations; called where there is one.
      form: of the records, see `FORMS`.
      answers: "all" or "last": which of the assistant's messages are trained.
      seq_len: tokens to be predicted that an example may have; what is longer is cut at its end.

    Attributes:
      unread: fields of the records so far that nothing is made of, and fields of messages that the template does not
        name.
    """

    def __init__(
        self, tokenizer: Tokenizer, load: Callable[[], ChatTemplate], form: str, *, answers: str, seq_len: int
    ):
        self._tokenizer, self._load, self.form = tokenizer, load, form
        self._answers, self.seq_len = answers, seq_len
        strings = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, strings)) or "(?!)")  # without any, finds nothing
        self.unread: set[str] = set()

    def encode(self, record: Record) -> list[Example]:
        """Return a record's example; of form "pairs" two: the chosen answer's and the rejected one's.

        Raises:
          ValueError: if nothing or everything of it would be trained, or the template cannot render it; see
            [Note: answers].
        """
        self.unread.update(name for name, value in record.items() if name not in READ[self.form] and value is not None)
        tools = read_tools(record.get("tools"))
        return [self._cut(*self._encode(*parts, tools)) for parts in self._parts(record)]

    def encode_prompt(self, prompt: str | Sequence[Message], tools: Any = None) -> np.ndarray:
        """Return the ids [n] after which a model is to write an answer.

        Raises:
          ValueError: as `encode`.
        """
        if isinstance(prompt, str):
            return np.concatenate([self._tokenizer.start_ids, self._tokenizer.encode(prompt)]).astype(np.int32)
        return self._converse(read_messages(prompt), read_tools(tools)).encode_prompt()

    def find_stop(self) -> int:
        """Return the id that ends an answer in a conversation.

        Raises:
          ValueError: as `encode`.
        """
        ids, trained = self._encode([{"role": "user", "content": "a"}], [{"role": "assistant", "content": "b"}], None)
        return int(ids[trained][-1])

    def _parts(self, record: Record) -> list[tuple[Any, Any]]:
        """Return the prompt and what answers it, as texts or as messages: of each of the record's examples."""
        if self.form in _CONVERSATIONS:
            return [([], read_messages(_CONVERSATIONS[self.form](record)))]
        if self.form == "prompt":
            return [(record["prompt"], record["completion"])]
        prompt, chosen, rejected = record.get("prompt"), record["chosen"], record["rejected"]
        is_messages = isinstance(chosen, list) and read_messages(chosen)
        if isinstance(prompt, str) and is_messages and chosen[0]["role"] == "assistant":
            prompt = [{"role": "user", "content": prompt}]
        if chosen == rejected:
            raise ValueError("chosen and rejected are the same, and teach nothing; take the record out")
        if prompt is not None and not _begins_with(chosen, prompt):
            return [(prompt, chosen), (prompt, rejected)]
        if isinstance(chosen, str) or isinstance(rejected, str):
            raise ValueError(
                f"prompt is {_kind(prompt)}, chosen {_kind(chosen)}, rejected {_kind(rejected)}; write all three as "
                "texts, or chosen and rejected as lists of messages"
            )
        chosen, rejected = read_messages(chosen), read_messages(rejected)
        same = next((i for i, (a, b) in enumerate(zip(chosen, rejected)) if a != b), min(len(chosen), len(rejected)))
        for answer in (chosen[same:], rejected[same:]):
            if not answer or answer[0]["role"] != "assistant":
                raise ValueError(
                    "chosen and rejected are to differ from an answer of the assistant on, and differ "
                    f"{'before' if answer else 'nowhere'}; write what both answer alike"
                )
        return [(chosen[:same], chosen[same:]), (rejected[:same], rejected[same:])]

    def _encode(self, prompt: Any, answer: Any, tools: Any) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(prompt, str) and isinstance(answer, str):
            if tools:
                raise ValueError("its field tools needs messages, and its prompt is a text; take tools out")
            return self._encode_texts(prompt, answer)
        if isinstance(prompt, str) or isinstance(answer, str):
            raise ValueError(
                f"the prompt is {_kind(prompt)} and the answer {_kind(answer)}; write both as texts, or both as lists "
                "of messages"
            )
        messages = [*read_messages(prompt), *read_messages(answer)]
        answers = [at for at, one in enumerate(messages) if is_trained(one, at + 1)]
        trained = [at for at in answers if at >= len(prompt)][-1 if self._answers == "last" else 0 :]
        if not trained:
            roles = ", ".join(dict.fromkeys(one["role"] for one in messages)) or "none"
            raise ValueError(
                f"nothing of it would be trained: no message of role assistant has weight 1 (roles: {roles}); add an "
                "answer, rename roles to user and assistant, or take the record out"
            )
        return self._converse(messages[: trained[-1] + 1], tools).encode_answers(trained)

    def _converse(self, messages: list[Message], tools: Any) -> Conversation:
        template = self._template.given(tools)
        self.unread.update(f"{name} of messages" for name in template.unnamed(messages))
        messages = with_arguments(messages, as_text=template.takes_text)
        return Conversation(self._tokenizer, self._special, template, messages, tools)

    def _encode_texts(self, prompt: str, answer: str) -> tuple[np.ndarray, np.ndarray]:
        if not prompt or not answer:
            raise ValueError(
                f"its {'answer' if prompt else 'prompt'} is empty; take the record out, or write what is all trained "
                "as field text"
            )
        before = self.encode_prompt(prompt)
        after = np.concatenate([self._tokenizer.encode(answer), [self._tokenizer.eod_id]])
        return np.concatenate([before, after]).astype(np.int32), np.arange(len(before) + len(after)) >= len(before)

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        return self._load()

    @property
    def has_conversations(self) -> bool:
        """Tell whether a record was read that needs the template."""
        return "_template" in self.__dict__

    @property
    def digest(self) -> str:
        """Return what tokens depend on beside tokenizer and records; known once a record was read."""
        template = self.__dict__.get("_template")
        return f"{self.form}:{self._answers}" + (f":{template.digest}" if template else "")

    def _cut(self, tokens: np.ndarray, trained: np.ndarray) -> Example:
        most = self.seq_len + 1
        return Example(tokens[:most], trained[:most], len(tokens), int(trained[most:].sum()))


def _kind(value: Any) -> str:
    return {str: "a text", list: "a list of messages", type(None): "not there"}.get(type(value), type(value).__name__)


def _begins_with(messages: Any, prompt: Any) -> bool:
    """Tell whether an answer is the whole conversation, prompt and all, as some data sets have it."""
    if not isinstance(messages, list):
        return False
    if isinstance(prompt, str):
        return any(prompt.strip() in text for one in messages for text in texts_of(one.get("content")))
    return isinstance(prompt, list) and messages[: len(prompt)] == prompt
