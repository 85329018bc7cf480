"""Records of conversations, completions and choices: which tokens are trained, how they are packed, what is refused."""

import collections
import dataclasses
import itertools
import json
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
    opened,
    save_tokenizer,
    write_jsonl,
)

CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
TWO_TURNS = chat("Hi é", "Yo", "So?", "No.")


def _tokens_of(data, pairs):
    """Return ids and whether each is trained, of one document."""
    ids = np.concatenate([pairs[:1, INPUT], pairs[:, TARGET]])
    return ids.tolist(), [False, *pairs[:, TRAINED].astype(bool)]


def _table(data, *segments):
    """Return the same as `_tokens_of` from texts, and special tokens, each written down as trained ("+..") or not."""
    ids, trained = [], []
    for segment in segments:
        text = segment.removeprefix("+")
        special = data.tokenizer.special_tokens.get(text)
        found = [special] if special is not None else data.tokenizer.encode(text).tolist()
        ids += found
        trained += [segment.startswith("+")] * len(found)
    return ids, trained


START, END = "<|im_start|>", "<|im_end|>"
CHATML_TABLE = [START, "user\nHi é", END, "\n", START, "assistant\n", "+Yo", "+" + END, "\n"]
CHATML_TABLE += [START, "user\nSo?", END, "\n", START, "assistant\n", "+No.", "+" + END, "\n"]
# A special token inside the marks, as of tools or thoughts, and the stop token outside.
MARKED_INSIDE = MARKED.replace("{% generation %}", "{% generation %}[INST]hm[/INST]")
INSIDE_TABLE = [
    part for one in CHATML_TABLE for part in (["+[INST]", "+hm", "+[/INST]", one] if one in ("+Yo", "+No.") else [one])
]
A, B = "<|start_header_id|>", "<|end_header_id|>"
LLAMA3_TABLE = ["<s>", A, "user", B, "\n\nHi é", "<|eot_id|>", A, "assistant", B, "\n\n", "+Yo", "+<|eot_id|>"]
LLAMA3_TABLE += [A, "user", B, "\n\nSo?", "<|eot_id|>", A, "assistant", B, "\n\n", "+No.", "+<|eot_id|>"]
MISTRAL_TABLE = ["<s>", "[INST]", " Hi é ", "[/INST]", "+ Yo", "+</s>"]
MISTRAL_TABLE += ["[INST]", " So? ", "[/INST]", "+ No.", "+</s>"]
LAST_TABLE = [START, "user\nHi é", END, "\n", START, "assistant\nYo", END, "\n", START, "user\nSo?", END, "\n"]
LAST_TABLE += [START, "assistant\n", "+<think>hm</think>No.", "+" + END, "\n"]


@pytest.mark.parametrize(
    ("template", "table", "options"),
    [
        (CHATML, CHATML_TABLE, {}),
        (ENDED, [*CHATML_TABLE, "</s>"], {}),
        (MARKED, CHATML_TABLE, {}),
        (MARKED_INSIDE, INSIDE_TABLE, {}),
        (LLAMA3, LLAMA3_TABLE, {}),
        (MISTRAL, MISTRAL_TABLE, {}),
        (THINKING, LAST_TABLE, {"answers": "last"}),
    ],
    ids=["chatml", "ended", "marked", "marked with a special token inside", "llama3", "mistral", "thinking"],
)
def test_the_answers_of_a_conversation_are_trained_with_their_stop_token(tmp_path, template, table, options):
    record = json.loads(json.dumps(TWO_TURNS))
    record["messages"][-1]["thoughts"] = "hm"
    data = opened(tmp_path, [record], template, **options)
    assert _tokens_of(data, data.train[0]) == _table(data, *table)


def test_a_prompt_and_its_completion_begin_and_end_as_the_tokenizer_has_it(tmp_path):
    data = opened(tmp_path, [{"prompt": "2+2=", "completion": "4"}], None)
    assert _tokens_of(data, data.train[0]) == _table(data, "<s>", "2+2=", "+4", "+</s>")
    as_bytes = open_data(DataConfig(str(tmp_path / "chat.jsonl"), eval_fraction=0))
    assert as_bytes.train[0][:, TARGET].tolist() == [*b"2+2=4", 256]
    assert as_bytes.train[0][:, TRAINED].tolist() == [0, 0, 0, 0, 1, 1]


def test_messages_of_weight_0_and_those_of_the_prompt_are_not_trained(tmp_path):
    of_weight = json.loads(json.dumps(TWO_TURNS))
    of_weight["messages"][1]["weight"] = 0
    messages = TWO_TURNS["messages"]
    untrained = [segment.lstrip("+") if segment in ("+Yo", "+" + END) else segment for segment in CHATML_TABLE[:9]]
    for record in (of_weight, {"prompt": messages[:3], "completion": messages[3:]}):
        for template in (CHATML, MARKED):
            data = opened(tmp_path, [record], template)
            assert _tokens_of(data, data.train[0]) == _table(data, *untrained, *CHATML_TABLE[9:])


def test_contents_in_parts_and_calls_of_tools_are_texts(tmp_path):
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": " é"}]}]
    template = CHATML.replace(
        "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}"
    )
    data = opened(tmp_path, [{"messages": [*parts, CALL]}], template)
    table = [*CHATML_TABLE[:6], "+f", "+" + END, "\n"]
    assert _tokens_of(data, data.train[0]) == _table(data, *table)


def test_white_space_of_an_answer_is_trained_whatever_offsets_a_tokenizer_gives(tmp_path):
    text = "a\n    b  "
    table = [*CHATML_TABLE[:6], f"+{text}", "+" + END, "\n"]
    data = opened(tmp_path, [chat("Hi é", text)], MARKED, trim_offsets=True)
    assert _tokens_of(data, data.train[0]) == _table(data, *table)


def test_choices_are_two_rows_with_one_prompt(tmp_path):
    messages = TWO_TURNS["messages"]
    other = [*messages[:3], {"role": "assistant", "content": "Never"}]
    records = [
        {"prompt": messages[:3], "chosen": messages[3:], "rejected": other[3:]},
        {"chosen": messages, "rejected": other},
        {"prompt": "Hi é", "chosen": messages, "rejected": other},
    ]
    data = opened(tmp_path, records, seq_len=256)
    tables = [[*CHATML_TABLE[:5], "assistant\nYo", END, *CHATML_TABLE[8:]] for _ in range(2)]
    tables[1] = ["+Never" if segment == "+No." else segment for segment in tables[1]]
    batch = next(iter(make_pass_iterator(data, data.train, batch_size=4, prefetch_batches=0)))
    assert {name: array.shape for name, array in batch.items()} == {
        **dict.fromkeys(("tokens", "targets", "weights"), (4, 2, 256)),
        "index": (4,),
    }
    for row, side in itertools.product(range(3), range(2)):
        ids, trained = _table(data, *tables[side])
        size = len(ids) - 1
        assert batch["tokens"][row, side, :size].tolist() == ids[:-1]
        assert batch["targets"][row, side, :size].tolist() == ids[1:]
        assert batch["weights"][row, side].astype(bool).tolist() == trained[1:] + [False] * (256 - size)
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
    for said in ("1 left out", "line 2", "2 are cut at 60"):
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
    assert (
        data.tokenizer is not None
        and data.weights == (0.75, 0.25)
        and len(data.eval) == 4 + 6
        and len(data.train) == 36 + 54
    )

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
        ([chat("a", "b")], "{% if %}", {}, ["no jinja"]),
        ([chat("a", "b")], "{{ strftime_now('%Y') }}", {}, ["strftime_now"]),
        ([chat("a", "b"), chat("a", roles="u")], CHATML, {}, ["line 2", "assistant", "roles: user"]),
        ([chat("a", "b", "c", roles="uta")], LLAMA3, {}, ["line 1", "no role tool"]),
        ([chat("a", "b", "c", roles="sua")], MISTRAL, {}, ["line 1", "leaves out message 1", "system"]),
        ([{**chat("a", "b"), "tools": [{"name": END}]}], CHATML, {}, ["field tools", END]),
        (
            [{"prompt": "x", "chosen": chat("a", "b")["messages"], "rejected": chat("a", "c")["messages"]}],
            CHATML,
            {},
            ["prompt"],
        ),
        ([{"prompt": "a", "chosen": "b", "rejected": "b"}], CHATML, {}, ["line 1", "the same"]),
        ([{"messages": [*chat("a")["messages"], {"role": "assistant", "content": None}]}], CHATML, {}, ["message 2"]),
        ([{"messages": [*chat("a")["messages"], {**CALL, "tool_calls": ["f"]}]}], CHATML, {}, ["as OpenAI does"]),
        ([chat("a", "b", "c", "d")], THINKING, {}, ["line 1", "rewrites history", "--answers last"]),
        ([chat("a", "b")], CHATML.replace("<|im_end|>", "</turn>"), {}, ["without a special token"]),
        ([chat("a", f"b{END}")], CHATML, {}, ["message 2", "<|im_end|>", "take it out"]),
        ([chat("a", "b")], "{% generation %}" + CHATML + "{% endgeneration %}", {}, ["every token", "generation"]),
        ([chat("a" * 99, "b")], CHATML, {"seq_len": 50}, ["none is left", "cut off whole", "line 1"]),
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
