"""What chat templates make of the fields of a record: nothing is dropped silently, and each remedy helps."""

import dataclasses
import json

import pytest

from jfsdp.trainer.job import find_job
from jfsdp.trainer.run.config import TrainConfig
from jfsdp.trainer.sources.tokens import PairSource
from tests.refusals import refuses, refusing
from tests.trainer.chats import (
    CHATML,
    GEMMA,
    LLAMA3_TOOLS,
    MARKED,
    QWEN3,
    R1_DISTILL,
    TOOL_USE,
    chat,
    opened,
    save_tokenizer,
    shown,
    write_jsonl,
)

END = "<|im_end|>"
PLAIN = chat("Hi", "Yo")
THOUGHTS = chat("Hi", "<think>\nhm\n</think>\n\nYo")
REASONED = {"messages": [PLAIN["messages"][0], {**PLAIN["messages"][1], "reasoning_content": "hm"}]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
FUNCTION = {"name": "f", "arguments": {"city": "Zürich", "days": 3}}
CALLED = {
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": FUNCTION}]},
        {"role": "tool", "content": "12"},
        {"role": "assistant", "content": "Yo"},
    ],
    "tools": TOOLS,
}
# The front of an answer is before the mark, and a call after it.
MARKED_IN_PART = MARKED.replace(
    "{% generation %}{{ m.content }}", "{{ m.content[:1] }}{% generation %}{{ m.content[1:] }}"
)
MARKED_WITHOUT_CALLS = MARKED.replace(
    "{% endgeneration %}", "{% endgeneration %}{{ m.tool_calls | tojson if m.tool_calls }}"
)
NAMES_ONLY = CHATML.replace(
    "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("records", "template", "options", "expected"),
    [
        ([PLAIN, THOUGHTS], R1_DISTILL, {}, ["line 2", "message 2", "without the whole of its content", "remove"]),
        (
            [PLAIN],
            CHATML.replace("{{ m.c", "{{ m.content[1:] if m.role == 'user' else m.c"),
            {},
            ["a part of message 1"],
        ),
        ([PLAIN, REASONED], CHATML, {}, ["line 2", "message 2", "reasoning_content"]),
        ([PLAIN, REASONED], MARKED, {}, ["line 2", "message 2", "reasoning_content"]),
        ([PLAIN], MARKED_IN_PART, {}, ["line 1", "message 2", "content", "generation"]),
        ([PLAIN, CALLED], MARKED_WITHOUT_CALLS, {}, ["line 2", "leaves out tool 1"]),
        ([{**CALLED, "tools": None}], MARKED_WITHOUT_CALLS, {}, ["line 1", "message 2", "tool_calls"]),
        ([{**PLAIN, "tools": TOOLS}], CHATML, {}, ["line 1", "leaves out tool 1"]),
        ([{**CALLED, "tools": None}], NAMES_ONLY, {}, ["line 1", "message 2", "tool_calls"]),
        ([{**PLAIN, "tools": "f"}], LLAMA3_TOOLS, {}, ["line 1", "tools", "JSON text"]),
        ([{**PLAIN, "tools": ["f"]}], LLAMA3_TOOLS, {}, ["line 1", "tools", "list of objects"]),
        ([{"prompt": "a", "completion": "b", "tools": TOOLS}], CHATML, {}, ["line 1", "tools", "text"]),
    ],
)
def test_a_part_of_a_record_that_a_template_leaves_out_is_refused(tmp_path, records, template, options, expected):
    refuses(lambda: opened(tmp_path, records, template, **options), *expected)


def test_thoughts_are_trained_with_the_answer_that_a_template_writes_them_into(tmp_path):
    begin = f"<|im_start|>user\nHi{END}\n<|im_start|>assistant\n"
    data = opened(tmp_path, [THOUGHTS, REASONED], QWEN3)
    text = f"{begin}[[<think>\nhm\n</think>\n\nYo{END}]]\n"
    assert (shown(data, 0), shown(data, 1)) == (text, text)
    # Those of an earlier answer are history, and written as for the model.
    earlier = {"messages": [*THOUGHTS["messages"], *REASONED["messages"]]}
    data = opened(tmp_path, [earlier], QWEN3, answers="last")
    assert shown(data) == f"{begin}Yo{END}\n{text}"


def test_thoughts_under_several_names_are_one_text(tmp_path):
    def record(**thoughts):
        return {"messages": [PLAIN["messages"][0], {**PLAIN["messages"][1], **thoughts}]}

    expected = shown(opened(tmp_path, [REASONED], QWEN3))
    by_thinking = QWEN3.replace("m.reasoning_content", "m.thinking")
    for template in (QWEN3, by_thinking):
        for thoughts in ({"reasoning": "hm"}, {"thinking": "hm"}, {"thinking": "", "reasoning_content": "hm"}):
            assert shown(opened(tmp_path, [record(**thoughts)], template)) == expected
    for wrong in ({"reasoning_content": "hm", "thinking": "ah"}, {"thinking": ["hm"]}):
        with refusing("line 1", "message 2"):
            opened(tmp_path, [record(**wrong)], QWEN3)


def test_tools_and_calls_reach_the_template(tmp_path):
    call = '{"name": "f", "parameters": {"city": "Zürich", "days": 3}}'
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    assert shown(opened(tmp_path, [CALLED], LLAMA3_TOOLS)) == (
        f"<s>{head.format('system')}{json.dumps(TOOLS[0])}<|eot_id|>{head.format('user')}Hi<|eot_id|>"
        f"{head.format('assistant')}[[{call}<|eot_id|>]]{head.format('ipython')}12<|eot_id|>"
        f"{head.format('assistant')}[[Yo<|eot_id|>]]"
    )


def test_of_several_named_templates_that_for_tools_is_taken_with_tools(tmp_path):
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": TOOL_USE}]
    records = [PLAIN, {**PLAIN, "tools": TOOLS}]
    data = opened(tmp_path, records, named)
    assert "tools:" not in shown(data, 0) and "tools: f" in shown(data, 1)
    assert "tools:" in shown(opened(tmp_path, [PLAIN], named, chat_template="tool_use"))
    other = [{"name": "rag", "template": CHATML}, named[1]]
    refuses(lambda: opened(tmp_path, [PLAIN], other), "line 1", "rag, tool_use", "--chat-template")
    # As files, which go before the configuration.
    directory = tmp_path / "tokenizer" / "additional_chat_templates"
    directory.mkdir()
    (directory / "tool_use.jinja").write_text(TOOL_USE)
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(CHATML)
    files = opened(tmp_path, records, None)
    assert [shown(files, i) for i in (0, 1)] == [shown(data, i) for i in (0, 1)]


def test_fields_that_nothing_is_made_of_are_said(tmp_path):
    record = chat("Hi", "Yo") | {"source": "web", "tools": None}
    record["messages"][0]["stamp"] = 7
    data = opened(tmp_path, [PLAIN, record])
    assert "source, stamp of messages" in data.found
    # Of Alpaca's own file, what was trained before its form was known.
    data = opened(tmp_path, [{"instruction": "Hi", "input": "", "output": "Yo", "text": "Hi Yo"}])
    assert "form alpaca" in data.found and "--text-field text" in data.found
    data = opened(tmp_path, [{"instruction": "Hi", "output": "Yo", "text": "Hi Yo"}], text_field="text")
    assert data.form == "text"
    data = opened(tmp_path, [{"conversations": None, "text": "Hi Yo"}])
    assert data.form == "text"


PROMPTED = QWEN3.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")  # as QwQ and R1 do
# A prompt that was not asked for ends each conversation, as in some files for Command A.
ENDLESS = """{% for m in messages %}<|im_start|>
{{- '[INST]' if m.role == 'user' else '[/INST]' }}{{ m.content }}<|im_end|>
{%- endfor %}<|im_start|>[/INST]"""
FIRST = chat("Hi", "Yo", "So?", roles="aua")


@pytest.mark.parametrize(
    ("record", "template", "options", "expected", "rest"),
    [
        # What the last answer fails of too, training it only does not help.
        (chat("a", "b"), R1_DISTILL.replace("%}[INST]{%", "%}[INST]<think>{%"), {}, ["message 2", "<think>"], "last"),
        (chat("a", "b", "c", "d"), PROMPTED, {}, ["message 2", "rewrites history"], "white space"),
        # The tokenizer joins a space of the template with the answer.
        (
            chat("a", "b"),
            CHATML.replace("{{ m.content }}", "{{ ' ' + m.content }}").replace(
                "assistant\n{%", "assistant\n{{ ' ' }}{%"
            ),
            {"merges": [("Ġ", "b")]},
            ["message 2", "joins", "{% generation %}"],
            "white space",
        ),
        (chat("a", "\n\nb"), CHATML, {"merges": [("Ċ", "Ċ")]}, ["message 2", "joins", "white space"], "--answers last"),
        (FIRST, GEMMA.replace("'System", "'No"), {}, ["message 1", "no prompt", '"weight": 0'], "repair it"),
        (FIRST, CHATML.replace("if add", "if messages and add"), {}, ["no prompt for message 1", "weight"], "white"),
        (chat("a", "b"), ENDLESS, {}, ["message 2", "like a prompt for another answer"], "last"),
    ],
)
def test_a_message_recommends_what_helps(tmp_path, record, template, options, expected, rest):
    message = str(refuses(lambda: opened(tmp_path, [record], template, **options), *expected))
    assert rest not in message
    untrained = {"messages": [{**record["messages"][0], "weight": 0}, *record["messages"][1:]]}
    for says, helps in (
        ("--answers last", {"answers": "last"}),
        ("white space from", {"records": [chat("a", "b")]}),
        ('"weight": 0', {"records": [untrained]}),
    ):
        if says in message:
            opened(tmp_path, helps.pop("records", [record]), template, **options, **helps)


def test_pairs_with_messages_next_to_them_are_told_what_to_take_out(tmp_path):
    chosen, rejected = PLAIN["messages"], chat("Hi", "No")["messages"]
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    job = dataclasses.replace(find_job("llama-tiny"), vocab_size=None)
    path = tmp_path / "pairs.jsonl"
    config = TrainConfig(data=str(path), tokenizer=tokenizer, preference="dpo", eval_fraction=0)
    write_jsonl(path, [{"chosen": chosen, "rejected": rejected, "messages": chosen}] * 3)
    refuses(lambda: PairSource(config, job, 64), "remove messages")
    write_jsonl(path, [{"chosen": chosen, "rejected": rejected}] * 3)
    assert "1.5 steps per epoch" in PairSource(config, job, 64).describe_batch(2)


SHAREGPT = {
    "system": "Be brief.",
    "conversations": [
        {"from": "human", "value": "Hi"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"city": "Zürich", "days": 3}}'},
        {"from": "observation", "value": "12"},
        {"from": "gpt", "value": "Yo"},
    ],
    "tools": json.dumps(TOOLS),
}
NULL = {"weight": None, "tool_calls": None, "reasoning_content": None, "name": None}
ALPACA = {"instruction": "Add.", "input": "2+2", "output": "4", "system": "Be brief.", "history": [["Hi", "Yo"]]}


@pytest.mark.parametrize(
    ("record", "same"),
    [
        (SHAREGPT, {**CALLED, "messages": [{"role": "system", "content": "Be brief."}, *CALLED["messages"]]}),
        ({"conversations": PLAIN["messages"]}, PLAIN),
        ({"messages": [message | NULL for message in PLAIN["messages"]]}, PLAIN),
        ({**CALLED, "tools": json.dumps(TOOLS)}, CALLED),
        (
            {"conversations": [{"from": "gpt", "value": "No", "weight": 0}, *PLAIN["messages"]]},
            {"messages": [{"role": "assistant", "content": "No", "weight": 0}, *PLAIN["messages"]]},
        ),
        (ALPACA, chat("Be brief.", "Hi", "Yo", "Add.\n2+2", "4", roles="suaua")),
        ({"instruction": "Hi", "input": "", "output": "Yo", "text": "Hi Yo"}, PLAIN),
        ({"conversations": None, "messages": PLAIN["messages"], "instruction": None, "text": None}, PLAIN),
    ],
)
def test_records_of_others_and_fields_that_are_null_or_text_are_conversations(tmp_path, record, same):
    assert shown(opened(tmp_path, [record], LLAMA3_TOOLS)) == shown(opened(tmp_path, [same], LLAMA3_TOOLS))


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"conversations": [{"from": "bot", "value": "Hi"}]}, ["line 1", "turn 1", "'bot'", "gpt"]),
        ({"conversations": [{"from": "function_call", "value": "f()"}]}, ["line 1", "turn 1", "not JSON"]),
        ({"conversations": "Hi"}, ["line 1", "conversations", "list"]),
        ({"instruction": "Hi", "output": "Yo", "history": ["a"]}, ["line 1", "history", "pairs"]),
        ({"instruction": "Hi", "output": 4}, ["line 1", "content of message 2"]),
    ],
)
def test_records_of_others_that_are_not_understood_are_refused(tmp_path, record, expected):
    refuses(lambda: opened(tmp_path, [record]), *expected)


# Arguments are joined to text, as in DeepSeek's templates.
TEXT_ONLY = LLAMA3_TOOLS.replace("{{ call.arguments | tojson }}", "{{ '' + call.arguments }}")


def test_arguments_are_objects_or_text_as_the_template_takes_them(tmp_path):
    def called(template, arguments):
        function = {"name": "f"} if arguments is None else {"name": "f", "arguments": arguments}
        record = json.loads(json.dumps(CALLED))
        record["messages"][1]["tool_calls"][0]["function"] = function
        return shown(opened(tmp_path, [record], template))

    given = FUNCTION["arguments"]
    expected = called(LLAMA3_TOOLS, given)
    assert '"parameters": {"city": "Zürich", "days": 3}}' in expected
    for template in (LLAMA3_TOOLS, TEXT_ONLY):
        assert called(template, given) == called(template, json.dumps(given, ensure_ascii=False)) == expected
        assert '"parameters": {}}' in called(template, {})
    assert '{"city":"Zürich"}' in called(TEXT_ONLY, '{"city":"Zürich"}')
    for wrong in ("f(x)", "[1]", [1]):
        refuses(lambda wrong=wrong: called(LLAMA3_TOOLS, wrong), "line 1: message 2", "arguments")


def test_a_message_with_train_false_is_not_trained(tmp_path):
    record = chat("Hi", "No", "Hi", "Yo")
    for message, train in zip(record["messages"], (False, False, None, True)):
        message["train"] = train
    for template in (CHATML, MARKED):
        text = shown(opened(tmp_path, [record], template))
        assert f"\nNo{END}" in text and f"[[Yo{END}]]" in text and text.count("[[") == 1
    for message, train, fact in ((0, True, "message 1 has train true"), (1, "no", "message 2 has train 'no'")):
        wrong = json.loads(json.dumps(record))
        wrong["messages"][message]["train"] = train
        refuses(lambda wrong=wrong: opened(tmp_path, [wrong]), "line 1", fact)
