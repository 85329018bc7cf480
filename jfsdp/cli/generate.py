"""`jfsdp generate`: generate text with a trained model."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import tyro

from jfsdp.cli.console import print_wrapped
from jfsdp.cli.load_options import OpenOptions
from jfsdp.extras import need
from jfsdp.objects.path import as_path
from jfsdp.trainer.display import harmless
from jfsdp.trainer.help_groups import option
from jfsdp.trainer.options import Count, Location, Number, optional


@dataclasses.dataclass(frozen=True)
class Generate(OpenOptions):
    """Generate text with the model of a run or of a Hugging Face directory.

    Prompts are batched, with a KV cache that is sharded like the model. Not for serving: every token gathers the whole
    model unit by unit, unless --mesh has only axis tensor.
    """

    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="TEXT")] = ()
    """Text to continue. May be repeated."""
    data: Location = None
    """File of prompts: *.jsonl with prompt or messages, or text with a prompt per line."""
    chat: bool = False
    """Render each --prompt as a user's message with the chat template."""
    max_tokens: Count = option(128, least=1)
    """Maximum tokens of an answer."""
    temperature: Annotated[float, tyro.conf.arg(metavar="X")] = 0.0
    """Sampling temperature. 0: always the most likely token."""
    top_k: Number = None
    """Sample among the N most likely tokens. none: all."""
    top_p: Annotated[float | None, optional(float, "X")] = None
    """Sample among the most likely tokens with this total probability. none: all."""
    seed: Count = 0
    """Seed of the sampling."""
    rows: Count = option(16, least=1)
    """Prompts per batch."""
    json: bool = False
    """Print a line of JSON for each prompt: prompt, text and token ids."""

    def run(self) -> int:
        need("train")
        if bool(self.prompt) == (self.data is not None):
            raise ValueError("pass prompts: either --prompt TEXT, which may be repeated, or --data FILE")
        from jfsdp.trainer.generate import Generator, Sampling

        sampling = Sampling(self.temperature, self.top_k, self.top_p, self.seed)
        prompts = self._prompts()
        if self.chat_template is not None and all(isinstance(prompt, str) for _, prompt, _ in prompts):
            raise ValueError("--chat-template is for messages, but the prompts are texts; add --chat, or leave it out")
        opened = self.open()
        ends = (f"{opened.tokenizer.decode([one], special=True)!r} ({one})" for one in opened.stop)
        print_wrapped(f"{opened.description}; answers end with {' or '.join(ends)}", stderr=True)
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
        """Return the source line, the prompt (a text, or messages without the final answers), and tools of each."""
        if self.data is None:
            as_chat = [[{"role": "user", "content": text}] for text in self.prompt]
            return [("--prompt", one, None) for one in (as_chat if self.chat else self.prompt)]
        if self.chat:
            raise ValueError("--chat is for --prompt; records of --data are texts or messages; leave --chat out")
        path = as_path(self.data)
        found = []
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--data {self.data}: cannot be read ({error}); pass a file of prompts") from error
        for number, line in enumerate(lines, 1):
            if line.strip():
                place = f"{path}, line {number}"
                is_json = path.suffix in (".jsonl", ".ndjson")
                found.append((place, *(_record(line, place) if is_json else (line.rstrip("\r"), None))))
        if not found:
            raise ValueError(f"--data {self.data}: contains no prompt; write one in each line")
        return found

    def _encode(self, opened: Any, place: str, prompt: Any, tools: Any) -> Any:
        if self.chat and opened.config.tokenizer == "byte":
            raise ValueError("--chat: the byte tokenizer has no chat template; leave it out, or pass --tokenizer PATH")
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
        raise ValueError(f"{place}: not JSON ({getattr(error, 'msg', error)}); write one object per line") from error
    prompt = record.get("prompt", record.get("messages")) if isinstance(record, dict) else None
    if not isinstance(prompt, (str, list)) or not prompt:
        raise ValueError(f"{place}: has neither prompt nor messages; add one of these fields")
    if isinstance(prompt, list):
        while prompt and isinstance(prompt[-1], dict) and prompt[-1].get("role") == "assistant":
            prompt = prompt[:-1]  # the model generates the final answer again
        if not prompt:
            raise ValueError(f"{place}: contains only answers; add a user's message before them")
    return prompt, record.get("tools")
