"""Encoding of records as tokens with a mask of trained tokens: conversations, completions, pairs of answers."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jfsdp.trainer.data import messages as chat_messages
from jfsdp.trainer.data.chat import ChatTemplate
from jfsdp.trainer.data.conversation import Conversation
from jfsdp.trainer.data.records import READ, Record
from jfsdp.trainer.data.tokenizer import Tokenizer

ANSWERS = ("all", "last")
# Form -> the messages of a record that is one conversation.
_CONVERSATIONS: dict[str, Callable[[Record], Any]] = {
    "messages": operator.itemgetter("messages"),
    "sharegpt": chat_messages.read_sharegpt,
    "alpaca": chat_messages.read_alpaca,
}


class Example(NamedTuple):
    """One row or part of a row.

    Attributes:
      tokens: ids, int32 [n + 1]; the last one is only a target, the first only an input.
      trained: whether a token is trained, bool [n + 1].
      num_tokens: tokens before truncation.
      num_cut: trained tokens removed by truncation.
    """

    tokens: np.ndarray
    trained: np.ndarray
    num_tokens: int
    num_cut: int


class Examples:
    """Encodes records of one form as examples.

    Args:
      tokenizer: the tokenizer.
      load: returns the chat template; called for the first conversation.
      form: form of the records; see `FORMS`.
      answers: "all" or "last": the assistant's messages to train on.
      seq_len: most targets of an example; longer examples are truncated at their end.

    Attributes:
      unread: unused fields of the records so far, and fields of messages that the template does not mention.
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
        """Return the example of a record, or the two of a pair: chosen and rejected.

        Raises:
          ValueError: if no token or every token would be trained, or the template cannot render it; see
            [Note: answers].
        """
        self.unread.update(name for name, value in record.items() if name not in READ[self.form] and value is not None)
        tools = chat_messages.read_tools(record.get("tools"))
        return [self._cut(*self._encode(*parts, tools)) for parts in self._parts(record)]

    def encode_prompt(self, prompt: str | Sequence[chat_messages.Message], tools: Any = None) -> np.ndarray:
        """Return the ids [n] of a prompt, which end where the answer begins.

        Raises:
          ValueError: as `encode`.
        """
        if isinstance(prompt, str):
            return np.concatenate([self._tokenizer.start_ids, self._tokenizer.encode(prompt)]).astype(np.int32)
        return self._converse(chat_messages.read_messages(prompt), chat_messages.read_tools(tools)).encode_prompt()

    def find_stop(self) -> int:
        """Return the id that ends an answer in a conversation.

        Raises:
          ValueError: as `encode`.
        """
        ids, trained = self._encode([{"role": "user", "content": "a"}], [{"role": "assistant", "content": "b"}], None)
        return int(ids[trained][-1])

    def _parts(self, record: Record) -> list[tuple[Any, Any]]:
        """Return (prompt, answer) of each example of a record, as texts or messages."""
        if self.form in _CONVERSATIONS:
            return [([], chat_messages.read_messages(_CONVERSATIONS[self.form](record)))]
        if self.form == "prompt":
            return [(record["prompt"], record["completion"])]
        prompt, chosen, rejected = record.get("prompt"), record["chosen"], record["rejected"]
        is_messages = isinstance(chosen, list) and chat_messages.read_messages(chosen)
        if isinstance(prompt, str) and is_messages and chosen[0]["role"] == "assistant":
            prompt = [{"role": "user", "content": prompt}]
        if chosen == rejected:
            raise ValueError("chosen and rejected are the same, so there is nothing to learn; remove the record")
        if prompt is not None and not _begins_with(chosen, prompt):
            return [(prompt, chosen), (prompt, rejected)]
        if isinstance(chosen, str) or isinstance(rejected, str):
            raise ValueError(
                f"prompt is {_kind(prompt)}, chosen {_kind(chosen)}, rejected {_kind(rejected)}; write all three as "
                "texts, or chosen and rejected as lists of messages"
            )
        chosen, rejected = chat_messages.read_messages(chosen), chat_messages.read_messages(rejected)
        same = next((i for i, (a, b) in enumerate(zip(chosen, rejected)) if a != b), min(len(chosen), len(rejected)))
        for answer in (chosen[same:], rejected[same:]):
            if not answer or answer[0]["role"] != "assistant":
                raise ValueError(
                    "chosen and rejected must first differ at an answer of the assistant, but "
                    f"{'differ before one' if answer else 'one is the beginning of the other'}; use the same messages "
                    "before both answers"
                )
        return [(chosen[:same], chosen[same:]), (rejected[:same], rejected[same:])]

    def _encode(self, prompt: Any, answer: Any, tools: Any) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(prompt, str) and isinstance(answer, str):
            if tools:
                raise ValueError("field tools needs messages, but the prompt is a text; remove tools")
            return self._encode_texts(prompt, answer)
        if isinstance(prompt, str) or isinstance(answer, str):
            raise ValueError(
                f"the prompt is {_kind(prompt)} and the answer {_kind(answer)}; write both as texts, or both as lists "
                "of messages"
            )
        messages = [*chat_messages.read_messages(prompt), *chat_messages.read_messages(answer)]
        answers = [at for at, one in enumerate(messages) if chat_messages.is_trained(one, at + 1)]
        trained = [at for at in answers if at >= len(prompt)][-1 if self._answers == "last" else 0 :]
        if not trained:
            roles = ", ".join(dict.fromkeys(one["role"] for one in messages)) or "none"
            raise ValueError(
                f"no token would be trained: no message of role assistant has weight 1 (roles: {roles}); add an "
                "answer, rename roles to user and assistant, or remove the record"
            )
        return self._converse(messages[: trained[-1] + 1], tools).encode_answers(trained)

    def _converse(self, messages: list[chat_messages.Message], tools: Any) -> Conversation:
        template = self._template.given(tools)
        self.unread.update(f"{name} of messages" for name in template.unnamed(messages))
        messages = chat_messages.with_arguments(messages, as_text=template.takes_text)
        return Conversation(self._tokenizer, self._special, template, messages, tools)

    def _encode_texts(self, prompt: str, answer: str) -> tuple[np.ndarray, np.ndarray]:
        if not prompt or not answer:
            raise ValueError(
                f"its {'answer' if prompt else 'prompt'} is empty; remove the record, or use field text to train on "
                "all of it"
            )
        before = self.encode_prompt(prompt)
        after = np.concatenate([self._tokenizer.encode(answer), [self._tokenizer.eod_id]])
        return np.concatenate([before, after]).astype(np.int32), np.arange(len(before) + len(after)) >= len(before)

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        return self._load()

    @property
    def has_conversations(self) -> bool:
        """Whether a record that needs the template was read."""
        return "_template" in self.__dict__

    @property
    def digest(self) -> str:
        """Settings on which tokens depend, in addition to tokenizer and records; complete after the first record."""
        template = self.__dict__.get("_template")
        return f"{self.form}:{self._answers}" + (f":{template.digest}" if template else "")

    def _cut(self, tokens: np.ndarray, trained: np.ndarray) -> Example:
        most = self.seq_len + 1
        return Example(tokens[:most], trained[:most], len(tokens), int(trained[most:].sum()))


def _kind(value: Any) -> str:
    return {str: "a text", list: "a list of messages", type(None): "not there"}.get(type(value), type(value).__name__)


def _begins_with(messages: Any, prompt: Any) -> bool:
    """Return whether an answer contains its prompt, as in some data sets."""
    if not isinstance(messages, list):
        return False
    if isinstance(prompt, str):
        return any(prompt.strip() in text for one in messages for text in chat_messages.texts_of(one.get("content")))
    return isinstance(prompt, list) and messages[: len(prompt)] == prompt
