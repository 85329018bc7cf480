"""`jfsdp generate`: answers of a trained model."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro

from jfsdp.cli.load_options import OpenOptions
from jfsdp.extras import need
from jfsdp.trainer.display import harmless
from jfsdp.trainer.help_groups import option
from jfsdp.trainer.options import Count, Location, Number, optional


@dataclasses.dataclass(frozen=True)
class Generate(OpenOptions):
    """Generate from the model of a run, or of a directory as Hugging Face has them: to see what was learned.

    Prompts are computed together, with a cache of keys and values that is split like the model. This is no server:
    the whole model is gathered unit by unit for every token, unless --mesh splits it over tensor alone.
    """

    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="TEXT")] = ()
    """What to go on from. May be repeated."""
    data: Location = None
    """A file of prompts: *.jsonl with prompt or messages, or a text with one in each line."""
    chat: bool = False
    """Take each --prompt for a user's message, and render it by the chat template."""
    max_tokens: Count = option(128, least=1)
    """Tokens of an answer at most."""
    temperature: Annotated[float, tyro.conf.arg(metavar="X")] = 0.0
    """How random answers are. 0: always the likeliest token."""
    top_k: Number = None
    """Draw among the N likeliest tokens. none: among all."""
    top_p: Annotated[float | None, optional(float, "X")] = None
    """Draw among the likeliest tokens that together have this probability. none: among all."""
    seed: Count = 0
    """Of the draws."""
    rows: Count = option(16, least=1)
    """Prompts computed together."""
    json: bool = False
    """Print a line of JSON for each prompt: prompt, text, and the ids of the tokens."""

    def run(self) -> int:
        need("train")
        if bool(self.prompt) == (self.data is not None):
            raise ValueError("give prompts: either --prompt TEXT, which may be repeated, or --data FILE")
        from jfsdp.trainer.generate import Generator, Sampling

        sampling = Sampling(self.temperature, self.top_k, self.top_p, self.seed)
        prompts = self._prompts()
        if self.chat_template is not None and all(isinstance(prompt, str) for _, prompt, _ in prompts):
            raise ValueError("--chat-template is for messages, and the prompts are texts; add --chat, or leave it out")
        opened = self.open()
        ends = (f"{opened.tokenizer.decode([one], special=True)!r} ({one})" for one in opened.stop)
        print(f"{opened.description}; answers end with {' or '.join(ends)}", file=sys.stderr)
        ids = [self._encode(opened, *prompt) for prompt in prompts]
        generate = Generator(opened.model, opened.job, sampling, stop=opened.stop)
        sizes = {"longest": max(map(len, ids)), "rows": min(self.rows, len(ids))}  # so that all groups share a program
        for first in range(0, len(ids), self.rows):
            group = ids[first : first + self.rows]
            answers = generate(opened.state, group, self.max_tokens, first_row=first, **sizes)
            for (_, prompt, _), answer in zip(prompts[first:], answers):
                self._print(opened, prompt, answer)
        return 0

    def _prompts(self) -> list[tuple[str, Any, Any]]:
        """Return where each prompt stands, the prompt (a text, or messages up to the last to answer), and tools."""
        if self.data is None:
            as_chat = [[{"role": "user", "content": text}] for text in self.prompt]
            return [("--prompt", one, None) for one in (as_chat if self.chat else self.prompt)]
        if self.chat:
            raise ValueError("--chat is for --prompt; the records of --data say themselves what they are")
        path = Path(self.data).expanduser()
        found = []
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--data {self.data}: cannot be read ({error}); name a file of prompts") from error
        for number, line in enumerate(lines, 1):
            if line.strip():
                place = f"{path}, line {number}"
                is_json = path.suffix in (".jsonl", ".ndjson")
                found.append((place, *(_record(line, place) if is_json else (line.rstrip("\r"), None))))
        if not found:
            raise ValueError(f"--data {self.data}: holds no prompt; write one in each line")
        return found

    def _encode(self, opened: Any, place: str, prompt: Any, tools: Any) -> Any:
        if self.chat and opened.config.tokenizer == "byte":
            raise ValueError("--chat: the byte tokenizer has no chat template; leave it out, or give --tokenizer PATH")
        try:
            return opened.prompts.encode_prompt(prompt, tools)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error

    def _print(self, opened: Any, prompt: Any, answer: Any) -> None:
        ended = len(answer) and int(answer[-1]) in opened.stop
        text = opened.tokenizer.decode(answer[:-1] if ended else answer)
        if self.json:
            print(json.dumps({"prompt": prompt, "text": text, "tokens": answer.tolist()}), flush=True)
            return
        lines = [prompt] if isinstance(prompt, str) else [f"{one['role']}: {one.get('content')}" for one in prompt]
        shown = "\n".join(["--- " + "\n".join(lines), text, ""])
        print(harmless(shown), flush=True)


def _record(line: str, place: str) -> tuple[Any, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON ({error}); write one JSON object per line") from error
    prompt = record.get("prompt", record.get("messages")) if isinstance(record, dict) else None
    if not isinstance(prompt, (str, list)) or not prompt:
        raise ValueError(f"{place}: has neither a prompt nor messages; write what is to be answered in one of these")
    if isinstance(prompt, list):
        while prompt and isinstance(prompt[-1], dict) and prompt[-1].get("role") == "assistant":
            prompt = prompt[:-1]  # what a model is to write anew
        if not prompt:
            raise ValueError(f"{place}: holds nothing but answers; write what is to be answered before them")
    return prompt, record.get("tools")
