"""Claims about records: read from files as they are published, in every form."""
import gzip
import json
from pathlib import Path

import pytest
from conftest import raises
from tiny_target import CHAT, counting, write

from plumbing.records import UnusableRecord, find_records, read_messages, usable_messages

SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION, ANSWER, *_ = [message["content"] for message in CHAT]


@pytest.mark.parametrize("record", [
    {"messages": CHAT[:2]},
    {"messages": [{**message, "tool_calls": None} for message in CHAT[:2]]},
    {"messages": [{"role": "user", "content": [
        {"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 2?"}]}, CHAT[1]]},
    {"data": [QUESTION, ANSWER], "system": None, "history": [], "tools": ""},
    {"conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]},
    {"instruction": QUESTION, "output": ANSWER},
    {"instruction": QUESTION, "input": "", "output": ANSWER},
], ids=str)
def test_every_form_of_one_conversation_is_read_alike(record):
    assert read_messages(record) == usable_messages(record) == CHAT[:2]


def test_the_input_of_an_instruction_follows_it():
    record = {"instruction": "What is", "input": "2 + 2?", "output": ANSWER}
    assert read_messages(record)[0]["content"] == "What is\n\n2 + 2?"


@pytest.mark.parametrize("name, role", [
    ("human", "user"), ("user", "user"), ("gpt", "assistant"), ("chatgpt", "assistant"),
    ("assistant", "assistant"), ("bing", "assistant"), ("bard", "assistant"),
    ("system", "system"),
])
def test_roles_are_known_by_the_names_that_data_sets_give_them(name, role):
    for record in (
        {"conversations": [{"from": name, "value": "a"}]},
        {"messages": [{"role": name, "content": "a"}]},
    ):
        assert read_messages(record) == [{"role": role, "content": "a"}]


@pytest.mark.parametrize("record, messages", [
    ({"messages": CHAT, "system": "Be brief."}, [SYSTEM, *CHAT]),
    ({"conversations": CHAT[:2], "system_prompt": "Be brief."}, [SYSTEM, *CHAT[:2]]),
    ({"instruction": CHAT[2]["content"], "output": CHAT[3]["content"], "system": "Be brief.",
      "history": [[QUESTION, ANSWER]]}, [SYSTEM, *CHAT]),
], ids=["messages", "conversations", "instruction"])
def test_a_system_message_and_a_history_beside_a_conversation_are_read(record, messages):
    assert read_messages(record) == messages


TURN = {"role": "assistant", "content": "4"}


@pytest.mark.parametrize("record, reason", [
    ({"messages": CHAT, "tools": [{"name": "add"}]}, "tools cannot be read"),
    ({"messages": CHAT, "images": ["a.png"]}, "images cannot be read"),
    ({"messages": [CHAT[0], {**TURN, "tool_calls": [{}]}]}, "tool_calls cannot be read"),
    ({"messages": [CHAT[0], {**TURN, "reasoning_content": "a"}]},
     "reasoning_content cannot be read"),
    ({"messages": [*CHAT, {"role": "tool", "content": "4"}]}, "an unusable turn"),
    ({"messages": [SYSTEM, *CHAT], "system": "Be long."},
     "a system message beside a conversation that has one"),
    ({"messages": CHAT, "system": 3}, "an unusable turn"),
    ({"instruction": "a", "output": "b", "history": 3}, "an unusable history"),
    ({"instruction": "a", "output": "b", "history": [["a"]]}, "an unusable history"),
    ({"instruction": "a", "output": "b", "history": [["a", 3]]}, "an unusable turn"),
    ({"messages": [*CHAT, {"role": "user", "content": " \n"}]}, "an empty turn"),
    ({"messages": [CHAT[1], CHAT[0]]}, "no answer"),
], ids=str)
def test_a_record_of_which_a_part_cannot_be_read_is_refused_with_its_reason(record, reason):
    with pytest.raises(UnusableRecord) as caught:
        usable_messages(record)
    assert caught.value.reason == reason


@pytest.mark.parametrize("content, detail", [
    (3, "a message needs a role"), (["a"], "a part that is not text: 'a'"),
], ids=str)
def test_records_with_the_same_fault_have_the_same_reason_and_each_its_own_detail(content, detail):
    with pytest.raises(UnusableRecord) as caught:
        read_messages({"messages": [{"role": "user", "content": content}]})
    assert caught.value.reason == "an unusable turn"
    assert str(caught.value).startswith(f"an unusable turn: {detail}")


def test_a_file_that_is_no_json_is_an_input_error_that_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = json.dumps(counting(2))
    write(Path("deep"), "[" * 100_000)
    write(Path("cut.json"), text[:-5])
    write(Path("twice.json"), text + text)
    Path("a.parquet").write_bytes(b"PAR1" + bytes(20))
    Path("a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    Path("utf16").write_text(text, encoding="utf-16")
    for name, why in (
        ("nowhere", "nowhere: cannot be read"),
        (".", "cannot be read"),
        ("a.parquet", "a.parquet is not JSON"),
        ("a.jsonl.gz", "a.jsonl.gz is not JSON"),
        ("utf16", "utf16 is not JSON"),
        ("cut.json", "cut.json: the JSON array is damaged or cut short at its record 2"),
        ("deep", "deep: the JSON array is damaged or cut short at its record 1"),
        ("twice.json", "text after the JSON array"),
    ):
        raises(why, lambda: list(find_records(name)))
