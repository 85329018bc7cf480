"""Records as tokens of which some are trained: conversations, prompts with completions, choices between answers."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jfsdp.trainer.data.chat import ChatTemplate, Message, Span
from jfsdp.trainer.data.records import Record
from jfsdp.trainer.data.tokenizer import Tokenizer

ANSWERS = ("all", "last")


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
    """

    def __init__(
        self, tokenizer: Tokenizer, load: Callable[[], ChatTemplate], form: str, *, answers: str, seq_len: int
    ):
        self._tokenizer, self._load, self.form = tokenizer, load, form
        self._answers, self.seq_len = answers, seq_len
        strings = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, strings))) if strings else None

    def encode(self, record: Record) -> list[Example]:
        """Return a record's example; of form "pairs" two: the chosen answer's and the rejected one's.

        Raises:
          ValueError: if nothing or everything of it would be trained, or the template cannot render it; see
            [Note: answers].
        """
        return [self._cut(*self._encode(*parts, record.get("tools"))) for parts in self._parts(record)]

    def encode_prompt(self, prompt: str | Sequence[Message], tools: Any = None) -> np.ndarray:
        """Return the ids [n] after which a model is to write an answer.

        Raises:
          ValueError: as `encode`.
        """
        if isinstance(prompt, str):
            return np.concatenate([self._tokenizer.start_ids, self._tokenizer.encode(prompt)]).astype(np.int32)
        prompt = self._check(prompt, tools)
        self._check_dropped(prompt, tools, prompt=True)
        return self._ids(self._render(prompt, tools, prompt=True))

    def find_stop(self) -> int:
        """Return the id that ends an answer in a conversation.

        Raises:
          ValueError: as `encode`.
        """
        ids, trained = self._encode([{"role": "user", "content": "a"}], [{"role": "assistant", "content": "b"}], None)
        return int(ids[trained][-1])

    def _parts(self, record: Record) -> list[tuple[Any, Any]]:
        """Return the prompt and what answers it, as texts or as messages: of each of the record's examples."""
        if self.form == "messages":
            return [([], _check_messages(record["messages"]))]
        if self.form == "prompt":
            return [(record["prompt"], record["completion"])]
        prompt, chosen, rejected = record.get("prompt"), record["chosen"], record["rejected"]
        if isinstance(prompt, str) and _check_if_messages(chosen) and chosen[0]["role"] == "assistant":
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
        chosen, rejected = _check_messages(chosen), _check_messages(rejected)
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
            return self._encode_texts(prompt, answer)
        if isinstance(prompt, str) or isinstance(answer, str):
            raise ValueError(
                f"the prompt is {_kind(prompt)} and the answer {_kind(answer)}; write both as texts, or both as lists "
                "of messages"
            )
        messages = [*_check_messages(prompt), *_check_messages(answer)]
        of_assistant = [i for i, one in enumerate(messages) if one["role"] == "assistant"]
        trained = [i for i in of_assistant if i >= len(prompt) and _weight(messages[i])]
        trained = trained[-1:] if self._answers == "last" else trained
        if not trained:
            roles = ", ".join(dict.fromkeys(one["role"] for one in messages)) or "none"
            why = "all answers have weight 0" if of_assistant else f"no message is of role assistant (roles: {roles})"
            raise ValueError(
                f"nothing of it would be trained: {why}; add an answer, rename roles to user and assistant, or take "
                "the record out"
            )
        messages = self._check(messages[: trained[-1] + 1], tools)
        text, spans = self._template.render(messages, tools=tools)
        self._check_dropped(messages, tools)
        if self._template.marks:
            ids, mask = self._by_marks(text, spans, messages, trained)
        else:
            ids, mask = self._by_prefixes(text, messages, trained, tools)
        if not mask.any() or mask[1:].all():
            raise ValueError(
                f"{'every' if mask.any() else 'no'} token of it would be trained: so chat template "
                f"{self._template.name} marks it; repair its {{% generation %}}"
            )
        return ids, self._up_to_stops(ids, mask)

    def _encode_texts(self, prompt: str, answer: str) -> tuple[np.ndarray, np.ndarray]:
        if not prompt or not answer:
            raise ValueError(
                f"its {'answer' if prompt else 'prompt'} is empty; take the record out, or write what is all trained "
                "as field text"
            )
        before = self.encode_prompt(prompt)
        after = np.concatenate([self._tokenizer.encode(answer), [self._tokenizer.eod_id]])
        return np.concatenate([before, after]).astype(np.int32), np.arange(len(before) + len(after)) >= len(before)

    def _by_prefixes(
        self, text: str, messages: list[Message], trained: list[int], tools: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        ids = self._ids(text)
        mask, another = np.zeros(len(ids), bool), self._before_another(messages, text, tools)
        for at in trained:
            before, after = self._render(messages[:at], tools, prompt=True), self._render(messages[: at + 1], tools)
            shared = self._shared(another, after)
            if not self._is_end(after[shared:]) or not after[:shared].startswith(before):
                raise ValueError(
                    f"chat template {self._template.name} renders message {at + 1} otherwise where more follow, or "
                    "otherwise than its prompt promises: it rewrites history, so that what the answer was cannot be "
                    "told; train the last answer of each conversation only by --answers last, or give a template with "
                    "{% generation %} by --chat-template"
                )
            begin, end = (self._ids(part) for part in (before, after[:shared]))
            if not (np.array_equal(ids[: len(begin)], begin) and np.array_equal(ids[: len(end)], end)):
                raise ValueError(
                    f"message {at + 1} begins or ends with characters that the tokenizer joins with what stands beside "
                    "them, so that its tokens cannot be told; take white space off its ends"
                )
            mask[len(begin) : len(end)] = True
        return ids, mask

    def _before_another(self, messages: list[Message], text: str, tools: Any) -> str:
        """Return what of a conversation would stand if another turn followed.

        Some templates end a conversation, and not its turns, with one more special token. Of one that would rewrite the
        last answer then, or takes no other turn, the text stays as it is.
        """
        try:
            other = self._render([*messages, {"role": "user", "content": "."}], tools)
        except ValueError:
            return text
        shared = self._shared(other, text)
        return text[:shared] if self._is_end(text[shared:]) else text

    def _is_end(self, text: str) -> bool:
        """Tell whether a text is nothing but special tokens and white space."""
        return not (text if self._special is None else self._special.sub("", text)).strip()

    def _shared(self, text: str, other: str) -> int:
        """Return how many characters two texts begin alike with, cutting no special token."""
        shared = next((i for i, (a, b) in enumerate(zip(text, other)) if a != b), min(len(text), len(other)))
        found = self._special.finditer(other) if self._special else ()
        return next((one.start() for one in found if one.start() < shared < one.end()), shared)

    def _by_marks(
        self, text: str, spans: list[Span], messages: list[Message], trained: list[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        of_assistant = [i for i, one in enumerate(messages) if one["role"] == "assistant"]
        if trained != of_assistant:
            if len(spans) != len(of_assistant):
                raise ValueError(
                    f"chat template {self._template.name} marks {len(spans)} places for {len(of_assistant)} messages "
                    "of the assistant, so that those trained cannot be told from the others; train all of them"
                )
            spans = [spans[of_assistant.index(at)] for at in trained]
        ids, offsets = self._tokenizer.encode_chat(text)
        mask = np.zeros(len(ids), bool)
        for begin, end in spans:
            mask |= (offsets[:, 1] > begin) & (offsets[:, 0] < end)  # all that overlap it
        return ids, mask

    def _up_to_stops(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Return a mask whose every run of tokens ends with a special one: cut there, or one token longer.

        Raises:
          ValueError: if a run has none and none follows.
        """
        special = np.append(np.isin(ids, list(self._tokenizer.special_tokens.values())), False)
        edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
        for begin, end in edges.reshape(-1, 2):
            stops = np.flatnonzero(special[begin : end + 1])
            if not len(stops):
                raise ValueError(
                    f"chat template {self._template.name} ends an answer without a special token of the tokenizer: a "
                    "model would never learn to stop; end answers with one, in a template given by --chat-template"
                )
            last = begin + stops[-1]
            if last == end and len(stops) > 1:  # of the next turn, if the one before ends this one but for white space
                before = begin + stops[-2]
                last = end if self._tokenizer.decode(ids[before + 1 : end]).strip() else before
            mask[begin : last + 1], mask[last + 1 : end] = True, False
        return mask

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

    def _render(self, messages: Sequence[Message], tools: Any, *, prompt: bool = False) -> str:
        return self._template.render(messages, prompt=prompt, tools=tools)[0]

    def _ids(self, text: str) -> np.ndarray:
        return self._tokenizer.encode_chat(text)[0]

    def _check(self, messages: Any, tools: Any) -> list[Message]:
        """Return messages; refuse what are none, and text that forges the end of a turn."""
        messages = _check_messages(messages)
        places = [(f"message {number}", message) for number, message in enumerate(messages, 1)]
        for place, value in [*places, ("its field tools", tools)]:
            for text in _strings(value):
                if self._special is not None and (found := self._special.search(text)):
                    raise ValueError(
                        f"{place} holds {found[0]!r} as text, which the tokenizer would read as its special token; "
                        "take it out"
                    )
        return messages

    def _check_dropped(self, messages: Sequence[Message], tools: Any, *, prompt: bool = False) -> None:
        """Refuse a message that makes no difference: of a role that the template does not know.

        Each text is marked at its end, by characters that no text holds, and the marks are looked for.
        """
        text = self._render([_marked(one, at) for at, one in enumerate(messages)], tools, prompt=prompt)
        for at, message in enumerate(messages):
            parts = {"message": bool(message["content"].strip()), "the tool_calls of message": bool(_calls(message))}
            for (what, is_there), mark in zip(parts.items(), _MARKS):
                if is_there and mark.format(at) not in text:
                    raise ValueError(
                        f"chat template {self._template.name} leaves out {what} {at + 1} of role {message['role']!r}; "
                        "take it out, or give a template that knows it by --chat-template"
                    )

    def _cut(self, tokens: np.ndarray, trained: np.ndarray) -> Example:
        most = self.seq_len + 1
        return Example(tokens[:most], trained[:most], len(tokens), int(trained[most:].sum()))


def _kind(value: Any) -> str:
    return {str: "a text", list: "a list of messages", type(None): "not there"}.get(type(value), type(value).__name__)


def _check_messages(messages: Any) -> list[Message]:
    """Return messages whose contents are texts: text in parts is joined, and none beside calls of tools is empty."""
    is_list = isinstance(messages, list) and all(isinstance(one, Mapping) for one in messages)
    if not is_list or not all(isinstance(one.get("role"), str) for one in messages):
        raise ValueError(
            'its messages are no list of objects with "role" and "content"; write them as OpenAI does: '
            '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
        )
    return [{**one, "content": _content(one, number)} for number, one in enumerate(messages, 1)]


def _content(message: Message, number: int) -> str:
    content = message.get("content")
    if content is None and _calls(message):
        return ""
    if isinstance(content, list) and len(_texts(content)) == len(content):
        return "".join(_texts(content))
    if not isinstance(content, str):
        raise ValueError(
            f"the content of message {number} is neither text nor a list of parts with text; write text there, or take "
            "the record out"
        )
    return content


def _check_if_messages(answer: Any) -> bool:
    return isinstance(answer, list) and bool(_check_messages(answer))


def _texts(content: Any) -> list[str]:
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return [text for text in texts if isinstance(text, str)]


# Of content and of calls of tools: characters for private use, which no text holds.
_MARKS = ("\ue0f0{}\ue0f1", "\ue0f2{}\ue0f1")


def _marked(message: Message, number: int) -> Message:
    """Return a message with a mark at the end of its content, and of the names of the tools that it calls."""
    of_content, of_calls = (mark.format(number) for mark in _MARKS)
    calls = [
        {**call, "function": {**call["function"], "name": call["function"]["name"] + of_calls}}
        for call in _calls(message)
    ]
    return {**message, "content": message["content"] + of_content, **({"tool_calls": calls} if calls else {})}


def _calls(message: Message) -> list[Any]:
    calls = message.get("tool_calls") or []
    if not all(isinstance(one, Mapping) and isinstance(one.get("function"), Mapping) for one in calls) or not all(
        isinstance(one["function"].get("name"), str) for one in calls
    ):
        raise ValueError(
            'its tool_calls are no list of {"function": {"name": "...", "arguments": {...}}}; write them as OpenAI does'
        )
    return list(calls)


def _strings(value: Any) -> Iterator[str]:
    """Yield all texts inside of JSON, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for pair in value.items() for one in pair for text in _strings(one))
    elif isinstance(value, list):
        yield from (text for one in value for text in _strings(one))


def _weight(message: Message) -> bool:
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise ValueError(f"a message has weight {weight!r}; it may be 0 (not trained) or 1")
    return bool(weight)


def _begins_with(messages: Any, prompt: Any) -> bool:
    """Tell whether an answer is the whole conversation, prompt and all, as some data sets have it."""
    if not isinstance(messages, list):
        return False
    if isinstance(prompt, str):
        return any(prompt.strip() in text for one in messages for text in _texts(one.get("content")))
    return isinstance(prompt, list) and messages[: len(prompt)] == prompt
