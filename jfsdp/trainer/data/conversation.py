"""One conversation as tokens: which of them are trained, and which parts its chat template leaves out."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np

from jfsdp.trainer.data.chat import ChatTemplate, Span
from jfsdp.trainer.data.messages import Message, find_cut, marked, strings_of
from jfsdp.trainer.data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages with the chat template and the tokenizer that make tokens of them; see [Note: answers].

    Attributes:
      tokenizer: for the rendered text.
      special: finds its special tokens in a text.
      template: for these messages and tools.
      messages: see `read_messages`.
      tools: see `read_tools`.

    Raises:
      ValueError: if a text holds a special token, and so forges the end of a turn.
    """

    tokenizer: Tokenizer
    special: re.Pattern[str]
    template: ChatTemplate
    messages: list[Message]
    tools: list[Any] | None

    def __post_init__(self):
        places = [(f"message {number}", message) for number, message in enumerate(self.messages, 1)]
        for place, value in [*places, ("its field tools", self.tools)]:
            for text in strings_of(value):
                if found := self.special.search(text):
                    raise ValueError(
                        f"{place} holds {found[0]!r} as text, which the tokenizer would read as its special token; "
                        "take it out"
                    )

    def encode_prompt(self) -> np.ndarray:
        """Return the ids [n] after which a model is to write an answer.

        Raises:
          ValueError: if the template fails, or leaves out a message or a tool.
        """
        text = self._render(len(self.messages), prompt=True)
        self._check_dropped(text, prompt=True)
        return self._ids(text)

    def encode_answers(self, trained: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return ids [n] and which of them are trained, bool [n].

        Args:
          trained: indices of the messages to train, the last message among them.

        Raises:
          ValueError: if the template fails, leaves out a message, a tool or a part of an answer, or if the tokens of an
            answer cannot be told.
        """
        text, spans = self.template.render(self.messages, tools=self.tools)
        self._check_dropped(text)
        ids, mask = self._by_marks(text, spans, trained) if self.template.marks else self._by_prefixes(text, trained)
        if not mask.any() or mask[1:].all():
            how_many = "every" if mask.any() else "no"
            raise ValueError(
                f"{how_many} token of it would be trained: so chat template {self.template.name} marks it; repair its "
                "{% generation %}"
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
                remedies += ["train the last answer of each conversation only by --answers last"] * (at != trained[-1])
                remedies += ["give a template with {% generation %} for all of it by --chat-template"]
                raise ValueError(f"{what}; {', or '.join(remedies)}") from error
        return ids, mask

    def _find(self, at: int, ids: np.ndarray, another: str) -> slice:
        """Return which tokens are an answer.

        Args:
          ids: the tokens of the conversation.
          another: its text up to where it differs with another turn after it.

        Raises:
          ValueError: of what keeps them from being told, and, if there is one, a remedy.
        """
        before, after = self._prompt_for(at), self._render(at + 1)
        end, same = self._shared(another, after), self._shared(before, after)
        written, rest = after[same:end], after[end:]
        which = f"chat template {self.template.name} renders message {at + 1}"
        if same < len(before):
            raise ValueError(f"{which} with {written[:20]!r} where the prompt for it has {before[same:][:20]!r}")
        if not written or not self._is_end(rest):
            raise ValueError(f"{which} otherwise where more follow: it rewrites history, so that it cannot be told")
        asked = before[self._shared(before, self._render(at)) :] or before[-len(rest) :]  # or: always asked
        if any(one in asked for one in self.special.findall(rest)):
            raise ValueError(f"{which} with {rest!r} after it, as if another answer were asked for")
        stops = [one.end() for one in self.special.finditer(written)]
        if not stops:
            raise self._no_stop()
        if cut := find_cut(self.messages[at], written, before):
            raise ValueError(f"{which} without the whole of its {cut}", "take out the rest of it")
        first, last = (self._ids(part) for part in (before, before + written[: stops[-1]]))
        if not all(np.array_equal(ids[: len(part)], part) for part in (first, last)):
            has_space = written[:1].isspace() and self.messages[at]["content"].startswith(written[:1])
            raise ValueError(
                f"the tokenizer joins {before[-9:]!r} and {written[:9]!r}, where message {at + 1} begins, so that its "
                "tokens cannot be told",
                *(["take white space off the front of the message"] if has_space else []),
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
        """Return the conversation's text up to where it differs if another turn follows.

        Some templates end a conversation, and not its turns, with one more special token. All of the text is returned
        for a template that would rewrite the last answer then, or that takes no other turn.
        """
        try:
            other, _ = self.template.render([*self.messages, {"role": "user", "content": "."}], tools=self.tools)
        except ValueError:
            return text
        shared = self._shared(other, text)
        return text[:shared] if self._is_end(text[shared:]) else text

    def _is_end(self, text: str) -> bool:
        """Tell whether a text is nothing but special tokens and white space."""
        return not self.special.sub("", text).strip()

    def _shared(self, text: str, other: str) -> int:
        """Return how many characters two texts begin alike with, cutting no special token."""
        shared = next((i for i, (a, b) in enumerate(zip(text, other)) if a != b), min(len(text), len(other)))
        return next((one.start() for one in self.special.finditer(other) if one.start() < shared < one.end()), shared)

    def _by_marks(self, text: str, spans: list[Span], trained: list[int]) -> tuple[np.ndarray, np.ndarray]:
        of_assistant = [i for i, one in enumerate(self.messages) if one["role"] == "assistant"]
        which = f"chat template {self.template.name} marks"
        if len(spans) == len(of_assistant):
            spans = [spans[of_assistant.index(at)] for at in trained]
        elif trained != of_assistant:
            raise ValueError(
                f"{which} {len(spans)} places for {len(of_assistant)} messages of the assistant, so that those trained "
                "cannot be told from the others; train all of them"
            )
        written = [text[begin:end] for begin, end in spans]
        for at, part in zip(trained, written if len(spans) == len(trained) else ["".join(written)] * len(trained)):
            if cut := find_cut(self.messages[at], part, ""):
                remedy = "take out the rest of it, or mend {% generation %} in the template"
                raise ValueError(f"{which} message {at + 1} without the whole of its {cut}; {remedy}")
        ids, offsets = self.tokenizer.encode_chat(text)
        mask = np.zeros(len(ids), bool)
        for begin, end in spans:
            mask |= (offsets[:, 1] > begin) & (offsets[:, 0] < end)  # all that overlap it
            if begin == end:  # an empty answer: the token after it, which has to be its stop
                mask[(offsets[:, 1] <= begin).sum() :][:1] = True
        return ids, mask

    def _up_to_stops(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Return a mask whose every run of tokens ends with a special one: cut there, or one token longer.

        Raises:
          ValueError: if a run has none and none follows.
        """
        special = np.append(np.isin(ids, list(self.tokenizer.special_tokens.values())), False)
        edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
        for begin, end in edges.reshape(-1, 2):
            stops = np.flatnonzero(special[begin : end + 1])
            if not len(stops):
                raise self._no_stop()
            last = begin + stops[-1]
            if last == end and len(stops) > 1:  # the next turn's, if the one before ends this one but for white space
                before = begin + stops[-2]
                last = end if self.tokenizer.decode(ids[before + 1 : end]).strip() else before
            mask[begin : last + 1], mask[last + 1 : end] = True, False
        return mask

    def _no_stop(self) -> ValueError:
        return ValueError(
            f"chat template {self.template.name} ends an answer without a special token of the tokenizer: a model "
            "would never learn to stop; end answers with one, in a template given by --chat-template"
        )

    def _check_dropped(self, text: str, *, prompt: bool = False) -> None:
        """Refuse a message, a call or a tool that makes no difference, or that is cut; see [Note: whole]."""
        messages, tools, marks = marked(self.messages, self.tools)
        rendered, _ = self.template.render(messages, prompt=prompt, tools=tools)
        dropped = [what for mark, what in marks.items() if mark not in rendered]
        prompts = [(at, one) for at, one in enumerate(self.messages, 1) if one["role"] != "assistant"]
        dropped += [f"a part of message {at}" for at, one in prompts if find_cut(one, text, "")]
        if dropped:
            raise ValueError(
                f"chat template {self.template.name} leaves out {dropped[0]}; take it out, or give a template that "
                "knows it by --chat-template"
            )

    def _render(self, num: int, *, prompt: bool = False) -> str:
        return self.template.render(self.messages[:num], prompt=prompt, tools=self.tools)[0]

    def _ids(self, text: str) -> np.ndarray:
        return self.tokenizer.encode_chat(text)[0]
