"""Records of conversations, completions and choices: which tokens are trained, how they are packed, what is refused."""

import collections
import dataclasses
import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jfsdp.trainer.data import documents
from jfsdp.trainer.data.documents import INPUT, TARGET, TRAINED
from jfsdp.trainer.data.pipeline import make_eval_iterator, make_pass_iterator, make_train_iterator
from jfsdp.trainer.data.tokens import DataConfig, open_data
from tests.refusals import refuses
from tests.trainer.chats import (
    CHATML,
    ENDED,
    LLAMA3,
    MARKED,
    MISTRAL,
    THINKING,
    chat,
    marked,
    opened,
    save_tokenizer,
    shown,
    write_jsonl,
)

CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
TWO_TURNS = chat("Hi é", "Yo", "So?", "No.")
FIRST, ANSWER, SECOND, LAST = MESSAGES = TWO_TURNS["messages"]
LAST["thoughts"] = "hm"
OF_WEIGHT_0 = {"messages": [FIRST, ANSWER | {"weight": 0}, SECOND, LAST]}
PROMPTED = {"prompt": MESSAGES[:3], "completion": MESSAGES[3:]}
CRITIC = {"messages": [FIRST, {"role": "critic", "content": "no"}, ANSWER]}
PARTS = {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": " é"}]}
# A special token inside the marks, as of tools or thoughts, and the stop token outside.
MARKED_INSIDE = MARKED.replace("{% generation %}", "{% generation %}[INST]hm[/INST]")
WITH_CALLS = CHATML.replace(
    "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}"
)

# What is trained stands between [[ and ]].
START, END = "<|im_start|>", "<|im_end|>"
BEGUN = f"{START}user\nHi é{END}\n{START}assistant\n"
BOTH = f"{BEGUN}[[Yo{END}]]\n{START}user\nSo?{END}\n{START}assistant\n[[No.{END}]]\n"
ONLY_LAST = BOTH.replace(f"[[Yo{END}]]", f"Yo{END}")
LLAMA3_TURN = (
    "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n[[{}"
)
SHOWN = {
    "chatml": (TWO_TURNS, CHATML, {}, BOTH),
    "ended": (TWO_TURNS, ENDED, {}, f"{BOTH}</s>"),
    "marked": (TWO_TURNS, MARKED, {}, BOTH),
    "marked with a special token inside": (TWO_TURNS, MARKED_INSIDE, {}, BOTH.replace("[[", "[[[INST]hm[/INST]")),
    "llama3": (
        TWO_TURNS,
        LLAMA3,
        {},
        f"<s>{LLAMA3_TURN.format('Hi é', 'Yo<|eot_id|>]]')}{LLAMA3_TURN.format('So?', 'No.<|eot_id|>]]')}",
    ),
    "mistral": (TWO_TURNS, MISTRAL, {}, "<s>[INST] Hi é [/INST][[ Yo</s>]][INST] So? [/INST][[ No.</s>]]"),
    "thinking": (TWO_TURNS, THINKING, {"answers": "last"}, ONLY_LAST.replace("No.", "<think>hm</think>No.")),
    "weight 0": (OF_WEIGHT_0, CHATML, {}, ONLY_LAST),
    "weight 0, marked": (OF_WEIGHT_0, MARKED, {}, ONLY_LAST),
    "messages of a prompt": (PROMPTED, CHATML, {}, ONLY_LAST),
    "messages of a prompt, marked": (PROMPTED, MARKED, {}, ONLY_LAST),
    "texts": ({"prompt": "2+2=", "completion": "4"}, None, {}, "<s>2+2=[[4</s>]]"),
    "parts and calls": ({"messages": [PARTS, CALL]}, WITH_CALLS, {}, f"{BEGUN}[[f{END}]]\n"),
    "white space, whatever offsets a tokenizer gives": (
        chat("Hi é", "a\n    b  "),
        MARKED,
        {"trim_offsets": True},
        f"{BEGUN}[[a\n    b  {END}]]\n",
    ),
}


@pytest.mark.parametrize(("record", "template", "options", "wanted"), SHOWN.values(), ids=SHOWN)
def test_answers_are_trained_with_their_stop_token(tmp_path, record, template, options, wanted):
    assert shown(opened(tmp_path, [record], template, **options)) == wanted


def test_a_prompt_and_its_completion_in_bytes(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "2+2=", "completion": "4"}])
    pairs = open_data(DataConfig(path, eval_fraction=0)).train[0]
    assert (pairs[:, TARGET].tolist(), pairs[:, TRAINED].tolist()) == ([*b"2+2=4", 256], [0, 0, 0, 0, 1, 1])


def test_choices_are_two_rows_with_one_prompt(tmp_path):
    other = [*MESSAGES[:3], {"role": "assistant", "content": "Never"}]
    records = [
        {"prompt": MESSAGES[:3], "chosen": MESSAGES[3:], "rejected": other[3:]},
        {"chosen": MESSAGES, "rejected": other},
        {"prompt": "Hi é", "chosen": MESSAGES, "rejected": other},
    ]
    data = opened(tmp_path, records, seq_len=256)
    batch = next(iter(make_pass_iterator(data, data.train, batch_size=4, prefetch_batches=0)))
    shapes = dict.fromkeys(("tokens", "targets", "weights"), (4, 2, 256)) | {"index": (4,)}
    assert {name: array.shape for name, array in batch.items()} == shapes
    for row, side in itertools.product(range(3), range(2)):
        tokens, targets, weights = (batch[name][row, side] for name in ("tokens", "targets", "weights"))
        end = np.flatnonzero(weights)[-1] + 2  # a line break follows the stop token
        assert tokens[1:end].tolist() == targets[: end - 1].tolist()
        text = marked(data, [tokens[0], *targets[:end]], [0, *weights[:end]])
        assert text == ONLY_LAST.replace("No.", "Never" if side else "No.")
    assert batch["index"][:3].tolist() == [0, 1, 2]
    assert not batch["weights"][3].any()
    data = open_data(dataclasses.replace(data.config, data=f"{data.config.data}:1,{data.config.data}:1"))
    batch = next(iter(make_pass_iterator(data, data.train, batch_size=6, prefetch_batches=0)))
    assert batch["index"].tolist() == list(range(6)), "those of all sources are counted together"


CONVERSATIONS = st.lists(
    st.lists(st.text(alphabet="ab\né", max_size=30), min_size=1, max_size=3), min_size=1, max_size=30
)


@settings(max_examples=25, deadline=None)
@given(CONVERSATIONS, st.integers(40, 120), st.integers(1, 3), st.sampled_from([None, 2, 3, 5]))
def test_every_trained_token_is_in_one_row_or_reported(conversations, seq_len, batch_size, most):
    records = [chat(*itertools.chain(*((text + "?", text + "!") for text in texts))) for texts in conversations]
    with tempfile.TemporaryDirectory() as directory:
        whole = opened(Path(directory), records, seq_len=10_000)
        shortest = min(len(whole.train[i]) for i in range(len(records)))
        data = opened(Path(directory), records, seq_len=max(seq_len, shortest), documents_per_row=most)
        documents = [data.train[i] for i in range(len(data.train))]
        data = dataclasses.replace(data, eval=data.train)
        rows = list(make_eval_iterator(data, batch_size=batch_size, prefetch_batches=0))
        rows = {name: np.concatenate([batch[name] for batch in rows]) for name in rows[0]}
        # Each document is one segment of one row, whole, with its own mask.
        expected = collections.Counter(tuple(map(tuple, one[:, [INPUT, TARGET, TRAINED]])) for one in documents)
        found = collections.Counter()
        for row in range(len(rows["tokens"])):
            for segment in range(1, rows["segment_ids"][row].max() + 1):
                at = rows["segment_ids"][row] == segment
                assert rows["positions"][row, at].tolist() == list(range(at.sum()))
                columns = (rows["tokens"][row, at], rows["targets"][row, at], rows["weights"][row, at].astype(int))
                found[tuple(zip(*(column.tolist() for column in columns)))] += 1
            assert most is None or rows["segment_ids"][row].max() < most
        assert found == expected
        counted = sum(int(whole.train[i][:, TRAINED].sum()) for i in range(len(whole.train)))
        lost = sum(
            one.num_cut
            for texts in records
            for one in data.train.parts[0].examples.encode(texts)  # type: ignore[union-attr]
        )
        assert int(rows["weights"].sum()) + lost == counted


def test_what_is_cut_and_left_out_is_said(tmp_path):
    records = [chat("a", "b" * 50), chat("a" * 60, "b"), chat("a", "b")]
    data = opened(tmp_path, records, seq_len=60)
    assert len(data.train) == 2
    for said in ("1 are left out", "line 2", "2 are cut at 60"):
        assert said in data.found
    trained = sum(int(data.train[i][:, TRAINED].sum()) for i in range(2))
    assert f"{trained} of" in data.found


def test_the_rest_of_a_text_that_was_cut_is_a_segment_of_its_own(tmp_path):
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    chats = write_jsonl(tmp_path / "a.jsonl", [chat("a", "b")])
    texts = write_jsonl(tmp_path / "b.jsonl", [{"text": "x" * 80}])
    data = open_data(DataConfig(f"{chats}:1,{texts}:1", tokenizer=tokenizer, seq_len=64, eval_fraction=0))
    (batch,) = make_pass_iterator(data, data.train, batch_size=2, prefetch_batches=0)
    answer, text = (len(data.train[i]) for i in range(2))
    sizes = [np.bincount(row)[1:].tolist() for row in batch["segment_ids"]]
    assert sizes == [[answer, text - 64], [64]]


def test_several_sources_are_taken_by_their_weights_and_go_on_where_they_were(tmp_path):
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    first = write_jsonl(tmp_path / "a.jsonl", [chat("a", f"{i}") for i in range(40)])
    second = write_jsonl(tmp_path / "b.jsonl", [{"text": f"text {i}"} for i in range(60)])
    config = DataConfig(f"{first}:3,{second}:1", tokenizer=tokenizer, seq_len=64, eval_fraction=0.1, shuffle_rows=8)
    data = open_data(config)
    assert (data.weights, len(data.eval), len(data.train)) == ((0.75, 0.25), 4 + 6, 36 + 54)
    assert data.tokenizer is not None

    def batches(num, iterator):
        return [next(iterator) for _ in range(num)]

    whole = batches(40, make_train_iterator(data, batch_size=4, prefetch_batches=0))
    is_text = text = 0
    for batch in whole:
        starts = (batch["positions"] == 0) & (batch["segment_ids"] > 0)
        is_text += int((starts & (batch["tokens"] == data.tokenizer.eod_id)).sum())
        text += int(starts.sum())
    assert abs(is_text / text - 0.25) < 0.03
    begun = make_train_iterator(data, batch_size=4, prefetch_batches=0)
    batches(13, begun)
    again = make_train_iterator(data, batch_size=4, prefetch_batches=0)
    again.set_state(begun.get_state())
    shares = [
        make_train_iterator(data, batch_size=2, process_index=i, process_count=2, prefetch_batches=0) for i in range(2)
    ]
    for share in shares:
        share.set_state(begun.get_state())
    for expected in whole[13:20]:
        one, parts = next(again), [next(share) for share in shares]
        for name, array in expected.items():
            np.testing.assert_array_equal(one[name], array)
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), array)


@pytest.mark.parametrize(
    ("records", "template", "options", "expected"),
    [
        ([chat("a", "b")], None, {}, ["line 1", "no chat template", "--chat-template"]),
        ([chat("a", "b")], "{{ 1 / 0 }}", {}, ["line 1", "ZeroDivisionError"]),
        ([chat("a", "b")], "{% include '/etc/passwd' %}", {}, ["line 1", "fails"]),
        ([chat("a", "b")], "{{ messages.__class__.__mro__ }}", {}, ["line 1", "fails", "unsafe"]),
        ([chat("a", "b")], "{{ 'x' * 10 ** 9 }}", {}, ["line 1", "characters"]),
        ([chat("a", "b")], "{% if %}", {}, ["not valid jinja"]),
        ([chat("a", "b")], "{{ strftime_now('%Y') }}", {}, ["strftime_now"]),
        ([chat("a", "b"), chat("a", roles="u")], CHATML, {}, ["line 2", "assistant", "roles: user"]),
        ([chat("a", "b", "c", roles="uta")], LLAMA3, {}, ["line 1", "no role tool"]),
        ([chat("a", "b"), CRITIC], CHATML, {}, ["line 2", "message 2", "'critic'", "system, user, assistant, tool"]),
        ([chat("a", "b", "c", roles="sua")], MISTRAL, {}, ["line 1", "leaves out message 1", "system"]),
        ([{**chat("a", "b"), "tools": [{"name": END}]}], CHATML, {}, ["field tools", END]),
        ([{"prompt": "x", "chosen": MESSAGES[:2], "rejected": chat("Hi é", "c")["messages"]}], CHATML, {}, ["prompt"]),
        ([{"prompt": "a", "chosen": "b", "rejected": "b"}], CHATML, {}, ["line 1", "the same"]),
        ([{"messages": [*chat("a")["messages"], {"role": "assistant", "content": None}]}], CHATML, {}, ["message 2"]),
        ([{"messages": [*chat("a")["messages"], {**CALL, "tool_calls": ["f"]}]}], CHATML, {}, ["as OpenAI does"]),
        ([chat("a", "b", "c", "d")], THINKING, {}, ["line 1", "rewrites history", "--answers last"]),
        ([chat("a", "b")], CHATML.replace("<|im_end|>", "</turn>"), {}, ["without a special token"]),
        ([chat("a", f"b{END}")], CHATML, {}, ["message 2", "<|im_end|>", "remove it"]),
        ([chat("a", "b")], "{% generation %}" + CHATML + "{% endgeneration %}", {}, ["every token", "generation"]),
        ([chat("a" * 99, "b")], CHATML, {"seq_len": 50}, ["is left to train on", "all of an answer is cut", "line 1"]),
        ([{"messages": "hello"}], CHATML, {}, ["line 1", "role"]),
        ([{"messages": [{"role": "user", "content": 3}]}], CHATML, {}, ["content of message 1"]),
        ([chat("a", "b") | {"x": 1}, {"prompt": "a", "completion": "b"}], CHATML, {}, ["line 2", "form prompt"]),
        ([{"prompt": "", "completion": "b"}], CHATML, {}, ["line 1", "prompt is empty"]),
        ([{"prompt": "a", "completion": ["b"]}], CHATML, {}, ["line 1", "a text", "a list of messages"]),
        ([{"chosen": "a", "rejected": "b"}], CHATML, {}, ["line 1", "prompt is not there"]),
        ([{"prompt": "a", "chosen": "a", "rejected": "b"}], CHATML, {"answers": "last"}, ["answers=", "conversations"]),
        ([{**chat("a", "b"), "messages": [{"role": "assistant", "content": "b", "weight": 0.5}]}], CHATML, {}, ["0.5"]),
        ([chat("a", "b")], CHATML, {"cross_documents": True}, ["cross_documents"]),
        ([chat("a", "b")], CHATML, {"answers": "first"}, ["all, last"]),
    ],
)
def test_what_cannot_be_trained_on_is_refused_with_its_line(tmp_path, records, template, options, expected):
    refuses(lambda: opened(tmp_path, records, template, **options), *expected)


def test_a_role_that_the_template_mentions_is_no_invention(tmp_path):
    assert opened(tmp_path, [CRITIC], "{# critic #}" + CHATML).train[0].size


def test_a_template_that_loops_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MOST_SECONDS", 0.2)
    loop = "{% for a in range(999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    refuses(lambda: opened(tmp_path, [chat("a", "b")], loop), "loop")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("{a}:0.5,{b}:0", ["0", "positive"]),
        ("{a}:1,{b}:1", ["messages, pairs"]),
        ("{a}:1,nothere.jsonl:1", ["nothere.jsonl"]),
        ("{a},{b}:1", ["needs a weight"]),
    ],
)
def test_sources_that_do_not_go_together_are_refused(tmp_path, data, expected):
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    files = {
        "a": write_jsonl(tmp_path / "a.jsonl", [chat("a", "b")] * 3),
        "b": write_jsonl(tmp_path / "b.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 3),
    }
    config = DataConfig(data.format(**files), tokenizer=tokenizer, eval_fraction=0)
    refuses(lambda: open_data(config), *expected)
