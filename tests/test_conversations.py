"""Claims about files of conversations and of prompts: read as they are published, and shuffled."""
import bz2
import gzip
import itertools
import json
import lzma
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_target import CHAT, STOP, counting, make_tiny_target, write

import llama
import train
from plumbing import conversations
from plumbing.conversations import Conversations, Stream
from plumbing.errors import InputError
from plumbing.prompts import Prompt, read_first_questions, read_prompts
from plumbing.records import find_records, read_messages


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> llama.Tokenizer:
    return llama.load_tokenizer(make_tiny_target(tmp_path_factory.mktemp("tiny")))


def encode(tokenizer: llama.Tokenizer, path: Path, seq_len: int, *records) -> Conversations:
    return train.read_conversations([str(write(path, *records))], tokenizer, seq_len)


# --- Conversations ---


def test_an_answer_is_the_assistants_tokens_and_their_stop_token_up_to_seq_len(
    tmp_path, tokenizer
):
    record = {"messages": CHAT}
    sequence = encode(tokenizer, tmp_path / "a", 200, record)[0]
    cut = encode(tokenizer, tmp_path / "a", 50, record)[0]
    assert encode(tokenizer, tmp_path / "a", 20, record)[0] is None  # no answer so far
    assert sequence.tokens.tolist() == tokenizer.chat(CHAT, add_generation_prompt=False)
    answers = []
    for message in CHAT[1::2]:
        answers += [*tokenizer.encode(message["content"]), STOP]
    assert sequence.tokens[sequence.answer].tolist() == answers
    assert int(sequence.answer.int().diff().clamp(min=0).sum()) == 2  # two stretches
    assert torch.equal(cut.tokens, sequence.tokens[:50])
    assert torch.equal(cut.answer, sequence.answer[:50])


def messages_of(record: dict) -> list[dict]:
    return read_messages(json.dumps(record).encode())


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
    kept, cuts = conversations.usable_part(messages_of(record))
    assert kept == CHAT[:2]
    assert cuts == ["cut at a turn that is empty or uses a tool"]


def test_answers_before_any_question_and_all_from_an_empty_turn_on_are_cut_and_counted(
    tmp_path, tokenizer, capsys
):
    system = {"role": "system", "content": ""}  # which may be empty
    early = {"role": "assistant", "content": "Hello!"}
    empty = {"role": "user", "content": " \n"}
    data = encode(
        tokenizer,
        tmp_path / "chats",
        200,
        {"messages": [early, *CHAT]},
        {"messages": [system, early, *CHAT[:2]]},
        {"messages": [*CHAT[:2], empty, *CHAT[2:]]},
        {"messages": [CHAT[0], {"role": "assistant", "content": ""}, *CHAT[2:]]},
    )
    kept = [CHAT, [system, *CHAT[:2]], CHAT[:2]]
    assert len(data) == 3
    for i, messages in enumerate(kept):
        assert data[i].tokens.tolist() == tokenizer.chat(messages, add_generation_prompt=False)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("line 4: no answer")
    assert lines[1:] == [
        "3 conversations, 1 records skipped",
        "  2 answers before any question left out",
        "  1 cut at a turn that is empty or uses a tool",  # and another that is skipped
        "  1 skipped: no answer",
    ]


BROKEN = {  # a line, and what is wrong with it
    "{half": "not valid JSON: Expecting",
    '{"a":' + "[" * 100_000: "recursion",
    '"text"': "neither messages",
    '{"data": 3}': "neither messages",
    '{"messages": []}': "no answer",
    '{"messages": [3]}': "an unusable turn",
    '{"data": ["a", 3]}': "an unusable turn",
    '{"data": ["a question"]}': "no answer",
    '{"conversations": [{"from": "nobody", "value": ""}, 3]}': "needs a role",
    '{"conversations": [{"from": ["user"], "value": ""}]}': "an unusable turn",
    '{"messages": [{"role": "user"}]}': "an unusable turn: 'content'",
    '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}': "part that is not text",
    '{"instruction": "a", "output": null}': "an unusable turn",
    '{"instruction": "a", "input": 3, "output": "b"}': "an input that is not text: 3",
    '{"data": ["\\ud800", "b"]}': "not valid UTF-8",
}
REASONS = [
    "  2 skipped: not valid JSON",
    "  2 skipped: neither messages, data or conversations nor instruction and output",
    "  2 skipped: no answer",
    "  8 skipped: an unusable turn",
    "  1 skipped: an input that is not text",
]


def test_a_broken_record_is_skipped_five_are_named_and_all_are_counted_by_reason(
    tmp_path, tokenizer, capsys, monkeypatch
):
    path = write(tmp_path / "a", *counting(3), *BROKEN, "", *counting(1))
    assert len(train.read_conversations([str(path)], tokenizer, 96)) == 4
    told = capsys.readouterr().err.splitlines()
    assert told[5:] == [f"4 conversations, {len(BROKEN)} records skipped", *REASONS]
    monkeypatch.setattr(conversations, "MAX_NAMED", 100)
    train.read_conversations([str(path)], tokenizer, 96)
    named = capsys.readouterr().err.splitlines()[:len(BROKEN)]
    assert named[:5] == told[:5]
    for number, (line, why) in enumerate(zip(named, BROKEN.values()), 4):
        assert line.startswith(f"skipped {path}, line {number}: ")
        assert why in line
        assert len(line) < 500


def test_lines_of_large_files_are_read_where_they_are(tmp_path, tokenizer):
    records = []
    for i in range(1000):  # 10 MB
        records.append({"data": [f"ö{'?' * (i % 9)}", f"answer {i}" + "b" * 10_000]})
    paths = [write(tmp_path / "a", *records[:301], "{"), write(tmp_path / "b", *records[301:])]
    data = train.read_conversations(list(map(str, paths)), tokenizer, 96)
    for i in (999, 0, 789, 301, 300, 299):
        tokens = tokenizer.chat(messages_of(records[i]), add_generation_prompt=False)
        assert data[i].tokens.tolist() == tokens[:96]
    tracemalloc.start()
    assert train.read_conversations([str(paths[1])], tokenizer, 96)[400]
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


def test_a_json_array_is_read_as_its_records_one_a_line_would_be(tmp_path, tokenizer, capsys):
    records = [{"data": ["Döner?", f"[{i}], \\ü"]} for i in range(5)] + [{"data": 3}]
    path = tmp_path / "array.json"
    text = json.dumps(records, indent=2, ensure_ascii=False)
    path.write_text("\ufeff \n" + text, encoding="utf-8")  # with a byte order mark
    data = train.read_conversations([str(path)], tokenizer, 96)
    lines = encode(tokenizer, tmp_path / "lines", 96, *records)
    assert len(data) == 5
    for i in range(5):
        assert torch.equal(data[i].tokens, lines[i].tokens)
    named, *_ = capsys.readouterr().err.splitlines()
    assert named.startswith(f"skipped {path}, record 6: neither messages")


def test_the_time_to_read_an_array_grows_with_its_length_only(tmp_path, tokenizer):
    turns = [{"from": "human", "value": "é" * 9}, {"from": "gpt", "value": "an answer " * 100}]
    record = json.dumps({"conversations": turns})
    path = write(tmp_path / "array.json", "[" + ",\n".join([record] * 10_000) + "]")
    began = time.process_time()
    data = train.read_conversations([str(path)], tokenizer, 96)
    assert time.process_time() - began < 5  # a fraction of a second; by its square, minutes
    assert len(data) == 10_000
    assert torch.equal(data[9_999].tokens, data[0].tokens)


def test_an_epoch_is_a_permutation_and_can_be_gone_on_with_at_any_position():
    def walk(position: int) -> list[int]:
        stream = Stream(range(20), np.arange(5, 15), seed=3, position=position)
        drawn = list(itertools.islice(stream, 25 - position))
        assert stream.position == 25
        return drawn

    order = walk(0)
    assert sorted(order[:10]) == list(range(5, 15))
    assert sorted(order[10:20]) == list(range(5, 15))
    assert order[:10] != order[10:20]
    for position in range(25):
        assert walk(position) == order[position:]


def test_one_usable_conversation_is_found_in_every_epoch():
    data = {i: i if i == 7 else None for i in range(10)}
    stream = Stream(data, np.arange(10), seed=0)
    for epoch in range(20):
        assert next(iter(stream)) == 7
        assert (stream.position - 1) // 10 == epoch


# --- Prompts and questions ---


def test_prompts_are_read_in_every_form(tmp_path):
    records = [
        {"prompt": "Hi"},
        {"category": "writing", "turns": ["Write.", "Again."]},
        {"messages": CHAT},
        {"data": ["Hi", "Hello!"]},
    ]
    path = write(tmp_path / "prompts", *records)
    (tmp_path / "array.json").write_text("\ufeff" + json.dumps(records), encoding="utf-8")
    prompts = [
        Prompt("other", ["Hi"]),
        Prompt("writing", ["Write.", "Again."]),
        Prompt("other", ["What is 2 + 2?", "Döner?"]),
        Prompt("other", ["Hi"]),
    ]
    questions = ["Hi", "Write.", "What is 2 + 2?", "Hi"]
    for file in (path, tmp_path / "array.json"):
        assert read_prompts(file) == prompts
        assert list(read_first_questions(file)) == questions


@pytest.mark.parametrize("line", [
    "Write a haiku.", "[1]", "3", '{"turns": []}', '{"prompt": 3}', '{"prompt": " \\n"}',
    '{"turns": ["a", ""]}', '{"prompt": "\\ud800"}', '{"prompt": "a", "category": "overall"}',
    '{"messages": [{"role": "assistant", "content": "a"}]}',
    '{"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}',
])
def test_a_malformed_or_empty_prompt_is_an_error_that_names_its_line_and_shows_a_right_one(
    tmp_path, line
):
    path = write(tmp_path / "prompts", {"prompt": "a"}, line)
    with pytest.raises(InputError, match=r'prompts, line 2: .*\{"prompt": '):
        read_prompts(path)


def test_a_file_without_prompts_is_an_error(tmp_path):
    with pytest.raises(InputError, match="no prompts"):
        read_prompts(write(tmp_path / "empty", ""))


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
    ("a.parquet", "a.parquet is Parquet, not JSON; try: python -c \"import pandas"),
    ("a.jsonl.gz", "a.jsonl.gz is gzip, not JSON; try: gunzip a.jsonl.gz"),
    ("a.jsonl.bz2", "a.jsonl.bz2 is bzip2, not JSON; try: bunzip2 a.jsonl.bz2"),
    ("a.jsonl.xz", "a.jsonl.xz is xz, not JSON; try: unxz a.jsonl.xz"),
    ("a.jsonl.zst", "a.jsonl.zst is zstd, not JSON; try: unzstd a.jsonl.zst"),
    ("a.feather", "a.feather is Arrow, not JSON; try: python -c \"import pandas"),
    ("a.arrow", "a.arrow is an Arrow stream, not JSON; try: python -c \"import datasets"),
    ("a.tar", "a.tar is a binary file, not JSON"),
    ("a.zip", "a.zip is a zip archive, not JSON; try: unzip a.zip"),
    ("utf16", "utf16 is UTF-16, not JSON; try: iconv -f UTF-16 -t UTF-8 utf16"),
    ("cut.json", "cut.json: the JSON array is damaged or cut short at its record 2"),
    ("deep", "deep: the JSON array is damaged or cut short at its record 1"),
    ("twice.json", "text after the JSON array"),
])
def test_a_file_that_is_no_json_says_what_it_is_and_what_to_do(files, monkeypatch, name, why):
    monkeypatch.chdir(files)
    with pytest.raises(InputError) as error:
        list(find_records(name))
    assert why in str(error.value)
