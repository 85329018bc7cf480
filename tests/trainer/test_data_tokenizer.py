"""Tokens: bytes, tokenizer.json, and ids that a model has no row for."""

import dataclasses
import functools
import pathlib

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jfsdp.cli.commands import main
from jfsdp.trainer.data.pipeline import make_train_iterator
from jfsdp.trainer.data.tokenizer import ByteTokenizer, load_tokenizer
from jfsdp.trainer.data.tokens import DataConfig, open_data
from tests.refusals import refuses
from tests.trainer.chats import with_sidecar


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory):
    def make(special):
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=special,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(["hello world, hello there"] * 10, trainer)
        path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
        tokenizer.save(str(path))
        return str(path)

    return make


@settings(deadline=None)
@given(st.text())
def test_bytes_round_trip(text):
    text = text.encode("utf-8", "replace").decode()
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and ids.tobytes() == np.frombuffer(text.encode(), np.uint8).astype(np.int32).tobytes()
    assert tokenizer.decode(np.append(ids, tokenizer.eod_id)) == text


def test_tokenizer_json_round_trips_and_finds_its_end_of_document_token(tokenizer_json):
    tokenizer = load_tokenizer(tokenizer_json(["<pad>", "</s>"]))
    ids = tokenizer.encode("hello wörld")
    assert ids.dtype == np.int32 and tokenizer.decode(ids) == "hello wörld"
    assert tokenizer.eod_id == 1 and ids.max() < tokenizer.vocab_size


def test_the_token_that_ends_a_document_is_known_or_given_and_not_read_in_a_text(tokenizer_json, tmp_path):
    path = tokenizer_json(["<|endoftext|>", "<end>"])
    ours, given = load_tokenizer(path), load_tokenizer(path, eod_token="<end>")
    assert (ours.eod_id, given.eod_id) == (0, 1) and ours.name != given.name
    assert ours.eod_id not in ours.encode("a <|endoftext|> b")
    (tmp_path / "broken.json").write_text("{}")
    none = tokenizer_json([])
    for path, options, facts in (
        (none, {}, ["<|endoftext|>"]),
        (none, {"eod_token": "<nope>"}, ["<nope>"]),
        (str(tmp_path / "nowhere.json"), {}, ["nowhere.json"]),
        (str(tmp_path / "broken.json"), {}, ["broken.json", "tokenizer.json"]),
        ("byte", {"eod_token": "<end>"}, ["leave it out"]),
    ):
        refuses(functools.partial(load_tokenizer, path, **options), *facts)


def test_the_end_of_a_document_is_the_configuration_s_where_no_known_token_is(tokenizer_json):
    path = tokenizer_json(["<fin>", "<eos>"])
    config = pathlib.Path(path).with_name("tokenizer_config.json")
    config.write_text('{"eos_token": {"content": "<fin>"}}')
    assert load_tokenizer(path).eod_id == 1
    path = tokenizer_json(["<pad>", "<fin>"])
    refuses(lambda: load_tokenizer(path), "eod_token=")
    config = pathlib.Path(path).with_name("tokenizer_config.json")
    config.write_text('{"eos_token": "<fin>"}')
    assert load_tokenizer(path).eod_id == 1
    config.write_text('{"eos_token": "<fin"')
    refuses(lambda: load_tokenizer(path), "tokenizer_config.json", "JSON")


def test_the_option_for_the_end_of_a_document_is_on_every_command(tokenizer_json, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("hello there\n")
    show = ["data", "show", str(tmp_path / "a.txt"), "--tokenizer", tokenizer_json(["<fin>"])]
    assert main(show) == 2 and "--eod-token" in capsys.readouterr().err
    assert main([*show, "--eod-token", "<fin>"]) == 0 and "<fin>" in capsys.readouterr().out


def test_documents_of_a_tokenizer_json_are_framed_by_its_end_of_document_id(tmp_path, tokenizer_json):
    (tmp_path / "a.txt").write_text("hello there")
    path = tokenizer_json(["<|endoftext|>"])
    data = open_data(DataConfig(str(tmp_path), tokenizer=path, eval_fraction=0))
    ids = load_tokenizer(path).encode("hello there")
    np.testing.assert_array_equal(data.train[0][:, 0], np.concatenate([[0], ids]))
    np.testing.assert_array_equal(data.train[0][:, 1], np.concatenate([ids, [0]]))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_token_id_beyond_the_model_raises_when_read_even_by_the_prefetching_thread(tmp_path, prefetch):
    np.array([1, 2, 50, 3], "<u2").tofile(tmp_path / "a.bin")
    config = DataConfig(with_sidecar(str(tmp_path / "a.bin"), dtype="uint16"), seq_len=2, eval_fraction=0)
    batches = make_train_iterator(open_data(config, vocab_size=50), batch_size=1, prefetch_batches=prefetch)
    refuses(lambda: next(batches), "a.bin@0", "id 50", "size 50")


def test_data_that_do_not_go_with_a_model_or_with_options_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    text = DataConfig(str(tmp_path), seq_len=2, eval_fraction=0)
    refuses(lambda: open_data(text, vocab_size=256), "256", "257")
    for options in ({"text_field": "body"}, {"answers": "last"}):
        ((name, value),) = options.items()
        refuses(open_data(dataclasses.replace(text, **options)).check_used, f"{name}='{value}'")
    np.array([1, 2**31, 3], "<u4").tofile(tmp_path / "a.bin")
    large = with_sidecar(str(tmp_path / "a.bin"), dtype="uint32")
    refuses(lambda: open_data(DataConfig(large, eval_fraction=0)).train[0], "2147483648")
    large = with_sidecar(large, dtype="uint32", vocab_size=100)
    refuses(lambda: open_data(DataConfig(large, eval_fraction=0), vocab_size=50), "a.bin", "size 50", "100")
