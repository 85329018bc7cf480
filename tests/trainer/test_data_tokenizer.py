"""Tokens: bytes, tokenizer.json, and ids that a model has no row for."""

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
from tests.refusals import refusing
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


def test_special_token_written_in_a_text_does_not_end_the_document(tokenizer_json):
    tokenizer = load_tokenizer(tokenizer_json(["<|endoftext|>"]))
    assert tokenizer.eod_id not in tokenizer.encode("a <|endoftext|> b")


def test_eod_token_option_wins(tokenizer_json):
    path = tokenizer_json(["<|endoftext|>", "<end>"])
    assert load_tokenizer(path).eod_id == 0
    assert load_tokenizer(path, eod_token="<end>").eod_id == 1
    assert load_tokenizer(path).name != load_tokenizer(path, eod_token="<end>").name


def test_tokenizer_without_end_of_document_raises_with_what_was_tried(tokenizer_json):
    with refusing("<|endoftext|>", "token"):
        load_tokenizer(tokenizer_json([]))
    with pytest.raises(ValueError, match="none of <nope> is in its vocabulary"):
        load_tokenizer(tokenizer_json([]), eod_token="<nope>")


def test_the_end_of_a_document_is_the_configuration_s_where_no_known_token_is(tokenizer_json):
    path = tokenizer_json(["<fin>", "<eos>"])
    config = pathlib.Path(path).with_name("tokenizer_config.json")
    config.write_text('{"eos_token": {"content": "<fin>"}}')
    assert load_tokenizer(path).eod_id == 1
    path = tokenizer_json(["<pad>", "<fin>"])
    with pytest.raises(ValueError, match="eod_token="):
        load_tokenizer(path)
    config = pathlib.Path(path).with_name("tokenizer_config.json")
    config.write_text('{"eos_token": "<fin>"}')
    assert load_tokenizer(path).eod_id == 1
    config.write_text('{"eos_token": "<fin"')
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: is not JSON"):
        load_tokenizer(path)


def test_the_option_for_the_end_of_a_document_is_on_every_command(tokenizer_json, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("hello there\n")
    show = ["data", "show", str(tmp_path / "a.txt"), "--tokenizer", tokenizer_json(["<fin>"])]
    assert main(show) == 2 and "--eod-token" in capsys.readouterr().err
    assert main([*show, "--eod-token", "<fin>"]) == 0 and "<fin>" in capsys.readouterr().out


def test_missing_or_broken_tokenizer_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.json: there is no such file"):
        load_tokenizer(str(tmp_path / "nowhere.json"))
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ValueError, match=r"broken\.json.*not a tokenizer.json"):
        load_tokenizer(str(tmp_path / "broken.json"))
    with pytest.raises(ValueError, match="leave it out"):
        load_tokenizer("byte", eod_token="<end>")


def test_documents_of_a_tokenizer_json_are_framed_by_its_end_of_document_id(tmp_path, tokenizer_json):
    (tmp_path / "a.txt").write_text("hello there")
    path = tokenizer_json(["<|endoftext|>"])
    data = open_data(DataConfig(str(tmp_path), tokenizer=path, eval_fraction=0))
    ids = load_tokenizer(path).encode("hello there")
    np.testing.assert_array_equal(data.train[0][:, 0], np.concatenate([[0], ids]))
    np.testing.assert_array_equal(data.train[0][:, 1], np.concatenate([ids, [0]]))


def test_tokenizer_larger_than_the_model_raises_at_opening(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with refusing("256", "257"):
        open_data(DataConfig(str(tmp_path), eval_fraction=0), vocab_size=256)


def test_sidecar_vocabulary_larger_than_the_model_raises_at_opening(tmp_path):
    np.arange(4, dtype="<u2").tofile(tmp_path / "a.bin")
    (tmp_path / "a.bin.json").write_text('{"dtype": "uint16", "vocab_size": 100}')
    with refusing("a.bin", "size 50", "100"):
        open_data(DataConfig(str(tmp_path / "a.bin"), eval_fraction=0), vocab_size=50)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_token_id_beyond_the_model_raises_when_read_even_by_the_prefetching_thread(tmp_path, prefetch):
    np.array([1, 2, 50, 3], "<u2").tofile(tmp_path / "a.bin")
    config = DataConfig(with_sidecar(str(tmp_path / "a.bin"), dtype="uint16"), seq_len=2, eval_fraction=0)
    batches = make_train_iterator(open_data(config, vocab_size=50), batch_size=1, prefetch_batches=prefetch)
    with refusing("a.bin@0", "id 50", "size 50"):
        next(batches)


def test_uint32_id_that_no_int32_holds_raises_without_a_known_vocabulary(tmp_path):
    np.array([1, 2**31, 3], "<u4").tofile(tmp_path / "a.bin")
    data = open_data(DataConfig(with_sidecar(str(tmp_path / "a.bin"), dtype="uint32"), eval_fraction=0))
    with pytest.raises(ValueError, match="2147483648"):
        data.train[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"text_field": "body"}, "text_field='body' is for JSONL, and the data have none; leave it out"),
        ({"answers": "last"}, "answers='last' is for conversations"),
    ],
)
def test_an_option_of_other_data_is_refused(options, words, tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    data = open_data(DataConfig(str(tmp_path), seq_len=2, eval_fraction=0, **options))
    with pytest.raises(ValueError, match=words):
        data.check_used()


def test_data_without_a_name_are_refused():
    with pytest.raises(ValueError, match="data='': names nothing"):
        DataConfig("")
