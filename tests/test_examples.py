"""The scripts of examples/ learn what they are made to learn."""

import json

import pytest
import safetensors.numpy
import tokenizers
import torch
import transformers

from examples import dataloaders, finetune_lora, linen, minimal, plan, vit


def test_the_minimal_loop_goes_on_where_it_was_stopped(tmp_path):
    whole = minimal.main(tmp_path / "whole", 100)
    minimal.main(tmp_path / "parts", 50)
    assert minimal.main(tmp_path / "parts", 50) == whole < 0.8


@pytest.mark.proof
def test_the_linen_model_predicts_rows_that_it_has_not_seen():
    assert linen.main(steps=60) > 0.8


@pytest.mark.proof
def test_the_adapter_of_a_fine_tuned_model_has_every_matrix(tmp_path):
    words = ["the", "cat", "sat", "on", "a", "mat"]
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: n for n, word in enumerate(words)}, "a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "base" / "tokenizer.json"))
    (tmp_path / "texts.jsonl").write_text((json.dumps({"text": "the cat sat on a mat " * 20}) + "\n") * 4)
    paths = (tmp_path / name for name in ("base", "texts.jsonl", "adapter"))
    losses = finetune_lora.main("llama-tiny", *paths, learning_rate=1e-2, steps=15, length=16)
    assert losses[-1] < losses[0] - 0.5
    arrays = safetensors.numpy.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert sum(name.endswith("lora_A.weight") for name in arrays) == 2 * 7
    assert all(array.any() for array in arrays.values())


def test_the_plan_of_the_example_shards_its_state(monkeypatch):
    monkeypatch.setattr(plan, "LAYERS", 2)
    found = plan.main(rows=256, strategies=("full_shard",))["full_shard"]
    assert found.fits and found.state.total < 12 * 2 * 8 * plan.WIDTH**2 / 60  # of 64 devices


@pytest.mark.proof
def test_the_vision_transformer_learns_in_a_loop_of_its_own(capsys):
    assert vit.main(steps=40, rows=16) > 0.5
    assert "step 40: loss" in capsys.readouterr().out


def test_batches_of_a_dataloader_are_trained_on_once_also_after_a_restart(tmp_path, capsys):
    whole = dataloaders.main(tmp_path / "whole", 40, num_workers=0)
    first = dataloaders.main(tmp_path / "parts", 20, num_workers=0)
    assert dataloaders.main(tmp_path / "parts", 40, num_workers=0) == whole < first
    assert capsys.readouterr().out.count("step 40: loss") == 2


def test_processes_read_other_rows_of_one_global_batch():
    half = dataloaders.ROWS // 2
    parts = [iter(dataloaders.Batches(256, range(start, start + half), done=3)) for start in (0, half)]
    whole = iter(dataloaders.Batches(256, range(2 * half), done=3))
    for _ in range(3):  # the last of a pass, and two of the next
        assert [*next(parts[0]), *next(parts[1])] == next(whole)
