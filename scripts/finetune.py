"""Fine-tune the model of `make train` with adapters, to describe Python functions in one line.

It runs and prints user commands: `jfsdp evaluate` before and after, `scripts/train.py --lora`, `jfsdp generate`,
`jfsdp checkpoint export`. At the end PEFT and transformers load the exported adapter, and must compute the same
held-out loss and the same answers. Exit status: 1 if they differ, 2 for invalid options.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import shlex
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tyro

from jfsdp.extras import MissingExtra, load, need
from jfsdp.trainer.help_groups import Options, option
from jfsdp.trainer.run import directory as runs

TRAIN = Path(__file__).with_name("train.py")
LORA = "rank=16,alpha=32,targets=**.attn.*.kernel,**.mlp.*.kernel"
QUESTION = "\n# In words:"
MOST_BYTES = 200  # largest size of a function with its answer; rows have 256 bytes


@dataclasses.dataclass(frozen=True)
class FinetuneConfig(Options):
    """Options of the fine-tuning.

    Attributes:
      base: a run of the recipe stdlib; None: the newest in runs/, or a new one of `base_steps`.
      run_dir: directory of all results; None: a new runs/finetune-DATE-TIME.
      steps: steps of fine-tuning.
      base_steps: steps of a new base.
      held_out: one of `held_out` functions is held out.
    """

    base: Path | None = None
    run_dir: Path | None = None
    steps: int = option(300, least=1)
    base_steps: int = option(200, least=1)
    held_out: int = option(10, least=2)


def functions() -> Iterator[tuple[str, str]]:
    """Yield short functions of the standard library without docstring, and the first line of the docstring."""
    seen = set()
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib"} & set(path.parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or not (docstring := ast.get_docstring(node)):
                continue
            node.body = node.body[1:] or [ast.Pass()]
            code, answer = ast.unparse(node), docstring.split("\n")[0].strip()
            size = len(f"{code}{QUESTION}{answer}".encode())
            if answer and size <= MOST_BYTES and code not in seen:
                seen.add(code)
                yield code, answer


def write_records(directory: Path, held_out: int) -> tuple[Path, Path, list[str]]:
    """Write training and held-out records. Return both files and three held-out prompts."""
    records = [{"prompt": f"{code}{QUESTION}", "completion": f" {answer}"} for code, answer in functions()]
    out = records[::held_out]
    kept = [record for number, record in enumerate(records) if number % held_out]
    for name, some in (("train", kept), ("held-out", out)):
        (directory / f"{name}.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in some))
    print(f"{len(kept):,} functions to train on, {len(out):,} held out", flush=True)
    prompts = [out[len(out) * part // 4]["prompt"] for part in (1, 2, 3)]
    return directory / "train.jsonl", directory / "held-out.jsonl", prompts


def call(*command: Any, is_read: bool = False) -> str:
    """Print and run a command. With `is_read`, return its output instead of showing it."""
    words = [str(word) for word in command]
    shown = ["python", *words[1:]] if words[0] == sys.executable else ["jfsdp", *words[1:]]
    print(f"\n$ {shlex.join(shown)}", flush=True)
    done = subprocess.run(words, stdout=subprocess.PIPE if is_read else None, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout or ""


def evaluate(jfsdp: str, path: Path, data: Path) -> float:
    """Return the loss of the held-out answers."""
    found = json.loads(
        call(jfsdp, "evaluate", path, "--data", data, "--param-dtype", "float32", "--json", is_read=True)
    )
    print(f"loss {found['loss']:.4f} nats per token of {found['weight']:,.0f}, accuracy {100 * found['correct']:.2f} %")
    return found["loss"]


def compute_with_peft(
    base: Path, adapter: Path, data: Path, prompts: Sequence[str], eod: int
) -> tuple[float, list[list[int]]]:
    """Return the held-out loss, and the ids of the answers to `prompts`, computed by PEFT and transformers."""
    peft, torch, transformers = (load(name, "peft") for name in ("peft", "torch", "transformers"))

    transformers.utils.logging.disable_progress_bar()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, str(adapter)).eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for line in data.read_text().splitlines():
            record = json.loads(line)
            prompt, answer = [eod, *record["prompt"].encode()], [*record["completion"].encode(), eod]
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            total += torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum").item()
            count += len(answer)
        answers = []
        for prompt in prompts:
            ids = torch.tensor([[eod, *prompt.encode()]])
            found = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=80,
                do_sample=False,
                eos_token_id=eod,
                pad_token_id=eod,
            )
            answers.append(found[0, ids.shape[1] :].tolist())
    return total / count, answers


def main(config: FinetuneConfig) -> int:
    """Train, export and compare. Return the exit status."""
    begin, jfsdp = time.perf_counter(), str(Path(sys.executable).with_name("jfsdp"))
    run_dir = config.run_dir or runs.new_run_dir("finetune")
    if run_dir.exists():
        raise ValueError(f"--run-dir {run_dir}: exists already; name a new one")
    if config.base is not None and not config.base.is_dir():
        raise ValueError(f"--base {config.base}: is not a directory; name the directory of a run")
    need("train")
    need("peft")
    run_dir.mkdir(parents=True)
    base = config.base
    if base is None:
        try:
            base = runs.newest_run_dir("stdlib")
        except ValueError:
            base = run_dir / "base"
            call(sys.executable, TRAIN, "--recipe", "stdlib", "--steps", config.base_steps, "--run-dir", base)
    data, held_out, prompts = write_records(run_dir, config.held_out)
    before = evaluate(jfsdp, base, held_out)
    options = ["--init-from", base, "--data", data, "--eval-fraction", 0, "--lora", LORA, "--batch-per-device", 2]
    options += ["--steps", config.steps, "--decay-steps", config.steps, "--eval-every", 0, "--sample-tokens", 0]
    tuned = run_dir / "tuned"
    call(sys.executable, TRAIN, "--recipe", "stdlib", *options, "--run-dir", tuned)
    after = evaluate(jfsdp, tuned, held_out)
    given = [word for prompt in prompts for word in ("--prompt", prompt)]
    lines = call(
        jfsdp, "generate", tuned, *given, "--param-dtype", "float32", "--max-tokens", 80, "--json", is_read=True
    )
    answers = [json.loads(line) for line in lines.splitlines()]
    for prompt, answer in zip(prompts, answers):
        print(f"\n{prompt}{answer['text']}")
    call(jfsdp, "checkpoint", "export", base, run_dir / "base-hf")
    call(jfsdp, "checkpoint", "export", tuned, run_dir / "adapter")
    theirs, their_answers = compute_with_peft(run_dir / "base-hf", run_dir / "adapter", held_out, prompts, 256)
    is_same = abs(theirs - after) < 1e-4 and their_answers == [answer["tokens"] for answer in answers]
    print(f"\nheld-out loss of answers: {before:.4f} before, {after:.4f} after; PEFT and transformers: {theirs:.4f}")
    are_same = their_answers == [answer["tokens"] for answer in answers]
    print(f"three answers of PEFT and transformers: {'the same' if are_same else 'NOT the same'}")
    print(f"{time.perf_counter() - begin:.0f} s in all; results in {run_dir}, the adapter in {run_dir / 'adapter'}")
    return 0 if is_same and after < before else 1


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(FinetuneConfig, description=__doc__)))
    except (MissingExtra, ValueError) as error:
        print(f"finetune.py: error: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, MissingExtra) else 2)
