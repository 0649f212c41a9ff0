"""Claims about records: read from files as they are published, in every form."""
import json
from pathlib import Path

import pytest
from conftest import raises
from tiny_target import CHAT, counting, write

from plumbing.records import UNUSABLE_TURN, find_records, read_messages, usable_messages

SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION, ANSWER, *_ = [message["content"] for message in CHAT]


@pytest.mark.parametrize("record", [
    {"messages": CHAT[:2]},
    {"messages": [{**message, "tool_calls": None} for message in CHAT[:2]]},
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
    ({"messages": [*CHAT, {"role": "tool", "content": "4"}]}, UNUSABLE_TURN),
    ({"messages": [SYSTEM, *CHAT], "system": "Be long."},
     "a system message beside a conversation that has one"),
    ({"messages": CHAT, "system": 3}, UNUSABLE_TURN),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, CHAT[1]]},
     UNUSABLE_TURN),
    ({"instruction": "a", "input": ["b"], "output": "c"},
     "none of messages, data, conversations, and instruction with output"),
    ({"instruction": "a", "output": "b", "history": 3}, "history is not a list of pairs"),
    ({"instruction": "a", "output": "b", "history": [["a"]]}, "history is not a list of pairs"),
    ({"instruction": "a", "output": "b", "history": [["a", 3]]}, UNUSABLE_TURN),
    ({"messages": [*CHAT, {"role": "user", "content": " \n"}]}, "an empty turn"),
    ({"messages": [CHAT[1], CHAT[0]]}, "no answer"),
], ids=str)
def test_a_record_of_which_a_part_cannot_be_read_is_refused_with_its_reason(record, reason):
    raises(reason, usable_messages, record)


def test_a_file_that_is_no_json_is_an_input_error_that_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = json.dumps(counting(2))
    write(Path("deep"), "[" * 100_000)
    write(Path("cut.json"), text[:-5])
    write(Path("twice.json"), text + text)
    for name, why in (
        ("nowhere", "nowhere: no such file"),
        (".", "cannot be read"),
        ("cut.json", "cut.json: not a JSON array"),
        ("deep", "deep: not a JSON array"),
        ("twice.json", "twice.json: not a JSON array"),
    ):
        raises(why, lambda: list(find_records(name)))
