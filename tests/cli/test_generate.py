"""`jfsdp generate` and `jfsdp data show`: against transformers, and what they refuse."""

import json
import re

import numpy as np
import pytest

from jfsdp.cli.commands import main
from jfsdp.cli.generate import Generate
from jfsdp.trainer.data.tokenizer import load_tokenizer
from tests.cli.refused import refused
from tests.refusals import check_facts
from tests.trainer.chats import chat, save_tokenizer, with_sidecar, write_jsonl

VOCAB = 288
SIZES = {"vocab_size": VOCAB, "initializer_range": 0.15, "bos_token_id": 256, "eos_token_id": 257}
DIMS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXTS = ["Hi", "A prompt of another length", "x"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models of transformers with random weights, and their directories."""
    import torch
    import transformers

    torch.manual_seed(0)
    common = {**SIZES, **DIMS, "num_key_value_heads": 2}
    made = {
        "mistral": transformers.MistralForCausalLM(transformers.MistralConfig(**common, sliding_window=8)),
        "gpt2": transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, n_embd=32, n_layer=2, n_head=4)),
    }
    found = {}
    for name, model in made.items():
        directory = tmp_path_factory.mktemp(name)
        save_tokenizer(directory)
        model.eval().save_pretrained(directory)
        found[name] = (model, str(directory))
    return found


def run(capsys, *args):
    assert main(["generate", *args, "--param-dtype", "float32", "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.filterwarnings("ignore::jfsdp.layout.lint.LayoutWarning")  # GPT-2's positions are not cut
@pytest.mark.parametrize("name", ["mistral", "gpt2"])
def test_the_tokens_are_those_of_transformers(models, capsys, name):
    import torch

    model, directory = models[name]
    prompts = [part for text in TEXTS for part in ("--prompt", text)]
    found = run(capsys, directory, *prompts, "--max-tokens", "24", "--mesh", "fsdp=2,tensor=2,replica=2")
    tokenizer = load_tokenizer(directory)
    for text, one in zip(TEXTS, found, strict=True):
        ids = np.concatenate([tokenizer.start_ids, tokenizer.encode(text)]).tolist()
        stop = [257, tokenizer.eod_id, tokenizer.special_tokens["<|im_end|>"]]  # the last is the chat template's
        with torch.no_grad():
            theirs = model.generate(
                torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=stop, pad_token_id=0
            )
        assert one["tokens"] == theirs[0, len(ids) :].tolist()


def test_prompts_of_a_file_and_conversations(models, capsys, tmp_path):
    directory = models["mistral"][1]
    alone = run(capsys, directory, "--prompt", "Hi", "--chat", "--max-tokens", "5")
    records = [chat("Hi", "an answer that is written anew"), {"prompt": [{"role": "user", "content": "Hi"}]}]
    data = write_jsonl(tmp_path / "prompts.jsonl", records)
    found = run(capsys, directory, "--data", data, "--rows", "1", "--max-tokens", "5")
    assert [one["tokens"] for one in found] == [alone[0]["tokens"]] * 2
    lines = tmp_path / "prompts.txt"
    lines.write_text("Hi\n\nA prompt\n")
    assert len(run(capsys, directory, "--data", str(lines), "--max-tokens", "2")) == 2


def test_the_loss_of_answers_is_that_of_transformers(models, capsys, tmp_path):
    import torch

    model, directory = models["mistral"]
    records = [{"prompt": f"{n} and {n}", "completion": f" {2 * n}"} for n in range(11)]
    data = write_jsonl(tmp_path / "data.jsonl", records)
    mesh = ["--mesh", "fsdp=2,tensor=2,replica=2"]
    options = ["--data", data, "--seq-len", "16", "--param-dtype", "float32", "--rows", "2", *mesh]
    assert main(["evaluate", directory, *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    tokenizer, total, count = load_tokenizer(directory), 0.0, 0
    for record in records:
        prompt = [*tokenizer.start_ids, *tokenizer.encode(record["prompt"])]
        answer = [*tokenizer.encode(record["completion"]), tokenizer.eod_id]
        with torch.no_grad():
            logits = model(torch.tensor([[int(x) for x in prompt + answer]])).logits[0, len(prompt) - 1 : -1]
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum").item()
        count += len(answer)
    assert found["weight"] == count
    assert found["loss"] == pytest.approx(total / count, rel=1e-5)
    assert main(["evaluate", directory, *options]) == 0
    assert f"{count} tokens" in capsys.readouterr().out
    rows = np.arange(60, dtype=np.uint16) % 7
    (tmp_path / "tokens.bin").write_bytes(rows.tobytes())
    binary = ["--data", str(tmp_path / "tokens.bin"), "--seq-len", "16", "--param-dtype", "float32", *mesh, "--json"]
    assert "tokens.bin.json" in refused(capsys, "evaluate", directory, *binary)
    with_sidecar(str(tmp_path / "tokens.bin"), dtype="uint16", eod_id=6)
    assert main(["evaluate", directory, *binary]) == 0
    assert json.loads(capsys.readouterr().out)["weight"] == 59
    pairs = write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    for args, expected in (
        (["--data", pairs], "--preference"),
        ([], "--data"),
        (["--data", data, "--rows", "0"], "--rows"),
        (["--data", data, "--rows", "99999999999"], "--rows"),
        (["--data", data, "--seq-len", "0"], "--seq-len 0"),
    ):
        assert expected in refused(capsys, "evaluate", directory, *args)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["{dir}"], "--prompt"),
        (["{dir}", "--prompt", "a", "--data", "b"], "--prompt"),
        (["nothere", "--prompt", "a"], "nothere: there is no such .*hf download nothere --local-dir nothere"),
        (["{other}", "--prompt", "a"], "neither the directory of a run"),
        (["{dir}", "--prompt", "a", "--tokenizer", "{other}"], "cannot|not|No such"),
        (["{dir}", "--prompt", "a", "--adapter", "nothere"], "nothere"),
        (["{dir}", "--prompt", "a", "--max-tokens", "0"], "--max-tokens 0"),
        (["{dir}", "--prompt", "a", "--max-tokens", "99999999999"], "--max-tokens 99999999999 must be a number from 1"),
        (["{dir}", "--prompt", "a", "--chat-template", "x"], "--chat-template is for messages, but the prompts are"),
        (["{dir}", "--prompt", "a", "--top-k", "3"], "temperature"),
        (["{dir}", "--prompt", "a<|im_end|>", "--chat"], "message 1 contains"),
        (["{dir}", "--data", "{records}"], "line 1"),
    ],
)
def test_what_cannot_be_generated_is_refused_in_a_line(models, capsys, tmp_path, args, expected):
    names = {"dir": models["mistral"][1], "other": str(tmp_path), "records": str(tmp_path / "r.jsonl")}
    write_jsonl(tmp_path / "r.jsonl", [{"text": "a"}])
    assert re.search(expected, said := refused(capsys, "generate", *(arg.format(**names) for arg in args))), said


@pytest.mark.parametrize(
    ("stored", "args", "expected"),
    [
        ({"tokenizer": 5}, [], "config.json of the run: --tokenizer 5 must be text"),
        ({"tokenizer": "gone", "eod_token": "<end>"}, ["--tokenizer", "byte"], "has no safetensors"),
        ({"tokenizer": "byte", "eod_token": "<end>"}, ["--tokenizer", "byte"], "--eod-token <end>"),
        ({"tokenizer": "gone"}, ["--tokenizer", "{dir}"], "tokenizer.json.*--tokenizer PATH, or byte"),
        ({}, ["--model", "gpt2"], "--model gpt2: '.*' is a run, whose config.json names its model; leave it out"),
    ],
)
def test_a_run_that_cannot_be_opened_is_refused_in_a_line(stored, args, expected, capsys, tmp_path):
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    (tmp_path / "config.json").write_text(json.dumps({"config": {"model": "llama-tiny"} | stored, "decides": {}}))
    args = [arg.format(dir=tmp_path) for arg in args]
    assert re.search(expected, refused(capsys, "generate", tmp_path, "--prompt", "a", *args))


FULL = [MemoryError("Unable to allocate 9 TiB\n---"), RuntimeError("RESOURCE_EXHAUSTED: 9 TiB\n---")]


@pytest.mark.parametrize("error", [*FULL, RuntimeError("INTERNAL: Out of memory allocating 128 bytes.\n---")])
def test_a_memory_that_does_not_suffice_is_told_in_a_line(error, capsys, monkeypatch):
    def fail(_):
        raise error

    monkeypatch.setattr(Generate, "run", fail)
    check_facts(refused(capsys, "generate", "there", "--prompt", "a"), f"({str(error)[:-4]})", "less at a time")


def test_data_are_shown_as_they_are_trained(capsys, tmp_path):
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    data = write_jsonl(tmp_path / "chat.jsonl", [chat("2+2?", "4"), chat("3+3?", "6")])
    assert main(["data", "show", data, "--tokenizer", tokenizer, "-n", "1"]) == 0
    said = capsys.readouterr().out
    assert "[[4<|im_end|>]]" in said and "3+3?" not in said and "4 of" in said
    assert main(["data", "show", data, "--tokenizer", tokenizer, "--start", "1", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    (example,) = shown["examples"]
    assert sum(example["trained"]) == 2 and len(example["tokens"]) == len(example["trained"])
    assert main(["data", "show", str(tmp_path / "tokenizer" / "tokenizer.json")]) == 0  # text, in bytes
    assert "[[" in capsys.readouterr().out
    assert "line 1" in refused(capsys, "data", "show", data)
