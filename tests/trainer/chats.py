"""A tokenizer and chat templates for tests: one token for each byte, and special tokens."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from jfsdp.trainer.data.documents import INPUT, TARGET, TRAINED
from jfsdp.trainer.data.tokens import DataConfig, open_data

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SPECIAL += ["<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"]

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA3 = """{{ bos_token }}{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}
{{ raise_exception('no role ' + m.role) }}{% endif %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

# No prompt for an answer of its own; and no role but these two.
MISTRAL = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]
{%- elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"""

# The stop token stands outside the marks.
MARKED = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>
{% else %}{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# One more special token ends the conversation, and not its turns.
ENDED = CHATML.removesuffix("{% endif %}") + "{% else %}{{ eos_token }}{% endif %}"

# Thoughts before the last answer are dropped, as Qwen 3 does.
THINKING = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last %}<think>{{ m.thoughts }}</think>{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Thoughts are in `reasoning_content` or at the front of the content, are written before the last answer, and dropped
# from those before.
QWEN3 = """{% for m in messages %}{% set content = m.content %}{% set thoughts = m.reasoning_content or '' %}
{%- if m.role == 'assistant' and not thoughts and '</think>' in content %}
{%- set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last %}<think>
{{ thoughts }}
</think>

{% endif %}{{ content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Thoughts are cut off each answer, as DeepSeek's R1 distilled into Qwen and Llama does.
R1_DISTILL = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}
{%- else %}[INST]{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}[INST]{% endif %}"""

LLAMA3_TOOLS = """{{ bos_token }}{% if tools is not none %}<|start_header_id|>system<|end_header_id|>

{% for t in tools %}{{ t | tojson }}{% endfor %}<|eot_id|>{% endif %}{% for m in messages %}
{%- if 'tool_calls' in m %}{% set call = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>

{{ '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- else %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

GEMMA = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

# Of several templates by name, that of conversations with tools.
TOOL_USE = "tools: {% for t in tools or [] %}{{ t.function.name }}{% endfor %}\n" + CHATML


def save_tokenizer(
    directory: Path,
    template: str | list | None = CHATML,
    merges: Sequence[tuple[str, str]] = (),
    trim_offsets: bool = False,
) -> str:
    """Write a tokenizer as Hugging Face has them; return the directory. It puts <s> before every text."""
    directory.mkdir(exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: number for number, char in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    start = tokenizer.token_to_id("<s>")
    begin = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    offsets = processors.ByteLevel(trim_offsets=trim_offsets)
    tokenizer.post_processor = processors.Sequence([offsets, begin])  # type: ignore[arg-type]
    tokenizer.save(str(directory / "tokenizer.json"))
    stated = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in stated.items() if v}))
    return str(directory)


def write_jsonl(path: Path, records: list) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def opened(directory: Path, records: Any, template: Any = CHATML, *, merges: Any = (), **options: Any) -> Any:
    """Write records and a tokenizer with a chat template; open them as data of which nothing is held out."""
    tokenizer = save_tokenizer(directory / "tokenizer", template, merges, options.pop("trim_offsets", False))
    path = write_jsonl(directory / "chat.jsonl", records)
    options = {"tokenizer": tokenizer, "eval_fraction": 0, "seq_len": 512, "shuffle_rows": 32} | options
    data = open_data(DataConfig(path, **options))
    data.check_used()
    return data


def marked(data: Any, ids: Any, trained: Any) -> str:
    """Return tokens as text, with those that are trained between [[ and ]]."""
    runs = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(trained)) + 1)
    texts = [data.tokenizer.decode(np.asarray(ids)[run], special=True) for run in runs]
    return "".join(f"[[{text}]]" if trained[run[0]] else text for run, text in zip(runs, texts))


def shown(data: Any, index: int = 0) -> str:
    """Return a document in the same way."""
    pairs = data.train[index]
    return marked(data, [*pairs[:1, INPUT], *pairs[:, TARGET]], [0, *pairs[:, TRAINED]])


def chat(*contents: str, roles: str = "ua") -> dict:
    """A conversation of a user and an assistant in turns."""
    names = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    roles = roles * len(contents) if roles == "ua" else roles
    return {"messages": [{"role": names[role], "content": text} for role, text in zip(roles, contents)]}


def with_sidecar(path: str, **fields: object) -> str:
    """Write the sidecar of a token file; return the path of the file."""
    Path(f"{path}.json").write_text(json.dumps(fields))
    return path
