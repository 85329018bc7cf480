"""Encoding of a conversation: token ids, a mask of trained tokens, and checks for parts that its template omits."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np

from jfsdp.trainer.data.chat import ChatTemplate, Span
from jfsdp.trainer.data.messages import ROLES, Message, find_cut, marked, strings_of
from jfsdp.trainer.data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages with their chat template and tokenizer; see [Note: answers].

    Attributes:
      tokenizer: the tokenizer.
      special: pattern of its special tokens.
      template: the template for these messages and tools.
      messages: see `read_messages`.
      tools: see `read_tools`.

    Raises:
      ValueError: if a text contains a special token, which would forge the end of a turn, or a role is neither a usual
        one nor in the template's source.
    """

    tokenizer: Tokenizer
    special: re.Pattern[str]
    template: ChatTemplate
    messages: list[Message]
    tools: list[Any] | None

    def __post_init__(self):
        for number, role in enumerate((one["role"] for one in self.messages), 1):
            if role not in ROLES and not self.template.mentions(role):
                known = ", ".join(ROLES)
                raise ValueError(f"message {number} has role {role!r}, not in the chat template; use one of {known}")
        places = [(f"message {number}", message) for number, message in enumerate(self.messages, 1)]
        for place, value in [*places, ("field tools", self.tools)]:
            for text in strings_of(value):
                if found := self.special.search(text):
                    raise ValueError(
                        f"{place} contains the text {found[0]!r}, which the tokenizer would read as a special token; "
                        "remove it"
                    )

    def encode_prompt(self) -> np.ndarray:
        """Return the ids [n] of the prompt, which end where the answer begins.

        Raises:
          ValueError: if the template fails, or omits a message or a tool.
        """
        text = self._render(len(self.messages), prompt=True)
        self._check_dropped(text, prompt=True)
        return self._ids(text)

    def encode_answers(self, trained: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return ids [n] and whether each is trained, bool [n].

        Args:
          trained: indices of the messages to train, including the last message.

        Raises:
          ValueError: if the template fails or omits a message, a tool or a part of an answer, or if the tokens of an
            answer cannot be located.
        """
        text, spans = self.template.render(self.messages, tools=self.tools)
        self._check_dropped(text)
        ids, mask = self._by_marks(text, spans, trained) if self.template.marks else self._by_prefixes(text, trained)
        if not mask.any() or mask[1:].all():
            how_many = "every" if mask.any() else "no"
            raise ValueError(
                f"{how_many} token would be trained, because of the marks of chat template {self.template.name}; "
                "repair its {% generation %}"
            )
        return ids, self._up_to_stops(ids, mask)

    def _by_prefixes(self, text: str, trained: list[int]) -> tuple[np.ndarray, np.ndarray]:
        ids, another = self._ids(text), self._before_another(text)
        mask = np.zeros(len(ids), bool)
        for at in reversed(trained):
            try:
                mask[self._find(at, ids, another)] = True
            except ValueError as error:
                what, *remedies = error.args
                remedies += ["train only the last answers with --answers last"] * (at != trained[-1])
                remedies += ["give a template with {% generation %} by --chat-template"]
                raise ValueError(f"{what}; {', or '.join(remedies)}") from error
        return ids, mask

    def _find(self, at: int, ids: np.ndarray, another: str) -> slice:
        """Return the tokens of an answer as a slice.

        Args:
          ids: the tokens of the conversation.
          another: the part of its text that does not change when another turn follows.

        Raises:
          ValueError: if they cannot be located. Its arguments are the reason and, optionally, a remedy.
        """
        before, after = self._prompt_for(at), self._render(at + 1)
        end, same = self._shared(another, after), self._shared(before, after)
        written, rest = after[same:end], after[end:]
        which = f"chat template {self.template.name} renders message {at + 1}"
        if same < len(before):
            raise ValueError(f"{which} with {written[:20]!r}, but the prompt for it has {before[same:][:20]!r}")
        if not written or not self._is_end(rest):
            raise ValueError(f"{which} differently when messages follow: it rewrites history")
        generation_prompt = before[self._shared(before, self._render(at)) :] or before[-len(rest) :]  # or: always there
        if any(one in generation_prompt for one in self.special.findall(rest)):
            raise ValueError(f"{which} with {rest!r} after it, like a prompt for another answer")
        stops = [one.end() for one in self.special.finditer(written)]
        if not stops:
            raise self._no_stop()
        if cut := find_cut(self.messages[at], written, before):
            raise ValueError(f"{which} without the whole of its {cut}", "remove the rest of it")
        first, last = (self._ids(part) for part in (before, before + written[: stops[-1]]))
        if not all(np.array_equal(ids[: len(part)], part) for part in (first, last)):
            has_space = written[:1].isspace() and self.messages[at]["content"].startswith(written[:1])
            raise ValueError(
                f"the tokenizer joins {before[-9:]!r} and {written[:9]!r}, where message {at + 1} begins, so its "
                "tokens cannot be located",
                *(["remove white space from the start of the message"] if has_space else []),
            )
        return slice(len(first), len(last))

    def _prompt_for(self, at: int) -> str:
        why = f"chat template {self.template.name} has no prompt for message {at + 1}"
        remedy = f'give message {at + 1} "weight": 0'
        try:
            before = self._render(at, prompt=True)
        except ValueError as error:
            raise ValueError(f"{why} ({error.__cause__})", remedy) from error
        if at == 0 and before == self._render(0):
            raise ValueError(why, remedy)
        return before

    def _before_another(self, text: str) -> str:
        """Return the part of the conversation's text that does not change when another turn follows.

        Some templates end a conversation, but not each turn, with another special token. Return the whole text if the
        template rewrites the last answer when a turn follows, or rejects another turn.
        """
        try:
            other, _ = self.template.render([*self.messages, {"role": "user", "content": "."}], tools=self.tools)
        except ValueError:
            return text
        shared = self._shared(other, text)
        return text[:shared] if self._is_end(text[shared:]) else text

    def _is_end(self, text: str) -> bool:
        """Return whether a text has only special tokens and white space."""
        return not self.special.sub("", text).strip()

    def _shared(self, text: str, other: str) -> int:
        """Return the length of the common prefix of two texts, without a part of a special token."""
        shared = next((i for i, (a, b) in enumerate(zip(text, other)) if a != b), min(len(text), len(other)))
        return next((one.start() for one in self.special.finditer(other) if one.start() < shared < one.end()), shared)

    def _by_marks(self, text: str, spans: list[Span], trained: list[int]) -> tuple[np.ndarray, np.ndarray]:
        of_assistant = [i for i, one in enumerate(self.messages) if one["role"] == "assistant"]
        which = f"chat template {self.template.name} marks"
        if len(spans) == len(of_assistant):
            spans = [spans[of_assistant.index(at)] for at in trained]
        elif trained != of_assistant:
            raise ValueError(
                f"{which} {len(spans)} places for {len(of_assistant)} messages of the assistant, so the trained ones "
                "cannot be located; train all of them"
            )
        written = [text[begin:end] for begin, end in spans]
        for at, part in zip(trained, written if len(spans) == len(trained) else ["".join(written)] * len(trained)):
            if cut := find_cut(self.messages[at], part, ""):
                remedy = "remove the rest of it, or repair {% generation %} in the template"
                raise ValueError(f"{which} message {at + 1} without the whole of its {cut}; {remedy}")
        ids, offsets = self.tokenizer.encode_chat(text)
        mask = np.zeros(len(ids), bool)
        for begin, end in spans:
            mask |= (offsets[:, 1] > begin) & (offsets[:, 0] < end)
            if begin == end:  # an empty answer: the token after it must be its stop token
                mask[(offsets[:, 1] <= begin).sum() :][:1] = True
        return ids, mask

    def _up_to_stops(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Return a mask in which every run ends at a special token: its last one, or the one that follows.

        Raises:
          ValueError: if a run has no special token, and none follows.
        """
        special = np.append(np.isin(ids, list(self.tokenizer.special_tokens.values())), False)
        edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
        for begin, end in edges.reshape(-1, 2):
            stops = np.flatnonzero(special[begin : end + 1])
            if not len(stops):
                raise self._no_stop()
            last = begin + stops[-1]
            if last == end and len(stops) > 1:  # `last` begins the next turn if only white space precedes it
                before = begin + stops[-2]
                last = end if self.tokenizer.decode(ids[before + 1 : end]).strip() else before
            mask[begin : last + 1], mask[last + 1 : end] = True, False
        return mask

    def _no_stop(self) -> ValueError:
        return ValueError(
            f"chat template {self.template.name} ends an answer without a special token of the tokenizer, so the model "
            "would not learn to stop; give a template that adds one by --chat-template"
        )

    def _check_dropped(self, text: str, *, prompt: bool = False) -> None:
        """Check that the template renders every message, call and tool completely; see [Note: whole]."""
        messages, tools, marks = marked(self.messages, self.tools)
        rendered, _ = self.template.render(messages, prompt=prompt, tools=tools)
        dropped = [what for mark, what in marks.items() if mark not in rendered]
        prompts = [(at, one) for at, one in enumerate(self.messages, 1) if one["role"] != "assistant"]
        dropped += [f"a part of message {at}" for at, one in prompts if find_cut(one, text, "")]
        if dropped:
            raise ValueError(
                f"chat template {self.template.name} leaves out {dropped[0]}; remove it, or give a template that "
                "renders it by --chat-template"
            )

    def _render(self, num: int, *, prompt: bool = False) -> str:
        return self.template.render(self.messages[:num], prompt=prompt, tools=self.tools)[0]

    def _ids(self, text: str) -> np.ndarray:
        return self.tokenizer.encode_chat(text)[0]
