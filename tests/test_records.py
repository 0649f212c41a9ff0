"""Claims about records: read from files as they are published, in every form."""
import bz2
import gzip
import json
import lzma
import zipfile
from pathlib import Path

import pytest
from tiny_target import CHAT, counting, write

from plumbing.errors import InputError
from plumbing.records import UnusableRecord, find_records, read_messages, usable_messages


def messages_of(record: dict) -> list[dict]:
    messages, ends_at_tool = read_messages(record)
    assert not ends_at_tool
    return messages


def test_four_formats_of_one_conversation_are_read_alike():
    question, answer = [message["content"] for message in CHAT[:2]]
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    for record in (
        {"messages": CHAT[:2]},
        {"messages": [{**message, "tool_calls": None} for message in CHAT[:2]]},
        {"data": [question, answer]},
        {"conversations": turns},
        {"instruction": question, "output": answer},
        {"instruction": question, "input": "", "output": answer},
    ):
        assert messages_of(record) == CHAT[:2]
    alpaca = messages_of({"instruction": "What is", "input": "2 + 2?", "output": answer})
    assert alpaca[0]["content"] == "What is\n\n2 + 2?"


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
        assert messages_of(record) == [{"role": role, "content": "a"}]


def test_text_in_parts_is_read_as_one():
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 2?"}]
    record = {"messages": [{"role": "user", "content": parts}, CHAT[1]]}
    assert messages_of(record) == CHAT[:2]


@pytest.mark.parametrize("turn", [
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]},
    {"role": "assistant", "content": "I add them.", "function_call": {"name": "add"}},
    {"role": "tool", "content": "4"},
    {"from": "observation", "value": "4"},
    {"role": "user", "content": None},
])
def test_what_came_before_a_tool_or_a_turn_without_text_is_kept(turn):
    record = {"messages": [*CHAT[:2], turn, *CHAT[2:]]}
    kept, cuts = usable_messages(record)
    assert kept == CHAT[:2]
    assert cuts == ["conversations cut at a turn that is empty or uses a tool"]


@pytest.mark.parametrize("content, detail", [
    (3, "a message needs a role"), (["a"], "a part that is not text: 'a'"),
], ids=str)
def test_records_with_the_same_fault_have_the_same_reason_and_each_its_own_detail(content, detail):
    with pytest.raises(UnusableRecord) as caught:
        read_messages({"messages": [{"role": "user", "content": content}]})
    assert caught.value.reason == "an unusable turn"
    assert str(caught.value).startswith(f"an unusable turn: {detail}")


# --- Files that are not what they should be ---


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("files")
    text = json.dumps(counting(2))
    write(path / "deep", "[" * 100_000)
    write(path / "cut.json", text[:-5])
    write(path / "twice.json", text + text)
    (path / "a.parquet").write_bytes(b"PAR1" + bytes(20))
    (path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (path / "a.jsonl.bz2").write_bytes(bz2.compress(text.encode()))
    (path / "a.jsonl.xz").write_bytes(lzma.compress(text.encode()))
    (path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    (path / "a.feather").write_bytes(b"ARROW1" + bytes(20))
    (path / "a.arrow").write_bytes(b"\xff\xff\xff\xff" + bytes(20))
    (path / "a.tar").write_bytes(b"a.json" + bytes(500))
    with zipfile.ZipFile(path / "a.zip", "w") as archive:
        archive.writestr("a.json", text)
    (path / "utf16").write_text(text, encoding="utf-16")
    (path / "folder").mkdir()
    return path


@pytest.mark.parametrize("name, why", [
    ("nowhere", "nowhere: cannot be read"),
    ("folder", "folder is a folder: name the files in it, as in folder/*.jsonl"),
    ("a.parquet", "a.parquet is not JSON but Parquet: convert it with pandas"),
    ("a.jsonl.gz", "a.jsonl.gz is not JSON but gzip: unpack it with gunzip"),
    ("a.jsonl.bz2", "a.jsonl.bz2 is not JSON but bzip2: unpack it with bunzip2"),
    ("a.jsonl.xz", "a.jsonl.xz is not JSON but xz: unpack it with unxz"),
    ("a.jsonl.zst", "a.jsonl.zst is not JSON but zstd: unpack it with unzstd"),
    ("a.feather", "a.feather is a binary file, not JSON"),
    ("a.arrow", "a.arrow is a binary file, not JSON"),
    ("a.tar", "a.tar is a binary file, not JSON"),
    ("a.zip", "a.zip is not JSON but a zip archive: unpack it with unzip"),
    ("utf16", "utf16 is not JSON but UTF-16: convert it with iconv -f UTF-16 -t UTF-8"),
    ("cut.json", "cut.json: the JSON array is damaged or cut short at its record 2"),
    ("deep", "deep: the JSON array is damaged or cut short at its record 1"),
    ("twice.json", "text after the JSON array"),
])
def test_a_file_that_is_no_json_says_what_it_is_and_what_to_do(files, monkeypatch, name, why):
    monkeypatch.chdir(files)
    with pytest.raises(InputError) as error:
        list(find_records(name))
    assert why in str(error.value)
