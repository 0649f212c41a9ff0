"""Claims about conversations to train on: as tokens, without broken records, and shuffled."""
import itertools
import json
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import raises
from tiny_target import CHAT, STOP, counting, make_tiny_target, write

import llama
from plumbing import conversations
from plumbing.conversations import Conversations, Stream, hold_out
from plumbing.records import usable_messages


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> llama.Tokenizer:
    return llama.load_tokenizer(make_tiny_target(tmp_path_factory.mktemp("tiny")))


def encode(tokenizer: llama.Tokenizer, path: Path, seq_len: int, *records) -> Conversations:
    return Conversations([str(write(path, *records))], tokenizer, seq_len)


def test_an_answer_is_the_assistants_tokens_and_their_stop_token_up_to_seq_len(
    tmp_path, tokenizer
):
    record = {"messages": CHAT}
    whole = encode(tokenizer, tmp_path / "a", 200, record)[0]
    cut = encode(tokenizer, tmp_path / "a", 50, record)[0]
    assert whole.tokens.tolist() == tokenizer.chat(CHAT, add_generation_prompt=False)
    answers = []
    for message in CHAT[1::2]:
        answers += [*tokenizer.encode(message["content"]), STOP]
    assert whole.tokens[whole.answer].tolist() == answers
    assert int(whole.answer.int().diff().clamp(min=0).sum()) == 2  # two stretches
    assert torch.equal(cut.tokens, whole.tokens[:50])
    assert torch.equal(cut.answer, whole.answer[:50])


def test_a_conversation_without_an_answer_within_seq_len_is_left_out(tmp_path, tokenizer):
    data = encode(tokenizer, tmp_path / "a", 50, {"data": ["?" * 50, "!"]}, {"messages": CHAT})
    (usable,) = data.read_usable([0, 1, 0])
    assert usable is data[1]
    assert not data[0].answer.any()
    raises("no answer within --seq-len tokens", hold_out,
           encode(tokenizer, tmp_path / "a", 20, {"messages": CHAT}), 0)


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
        "  2 answers left out because no question comes before them",
        "  1 conversations cut at a turn that is empty or uses a tool",  # a second one is skipped
        "  1 skipped: no answer",
    ]


BROKEN = {  # a line, and what is wrong with it
    "{half": "not valid JSON: Expecting",
    '{"a":' + "[" * 100_000: "recursion",
    '"text"': "not a JSON object",
    '{"data": 3}': "none of messages",
    '{"messages": []}': "no answer",
    '{"messages": [3]}': "an unusable turn",
    '{"data": ["a", 3]}': "an unusable turn",
    '{"data": ["a question"]}': "no answer",
    '{"conversations": [{"from": "nobody", "value": ""}, 3]}': "needs a role",
    '{"conversations": [{"from": ["user"], "value": ""}]}': "an unusable turn",
    '{"messages": [{"role": "user"}]}': "no content in {'role': 'user'}",
    '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}': "part that is not text",
    '{"instruction": "a", "output": null}': "an unusable turn",
    '{"instruction": "a", "input": 3, "output": "b"}': "an input that is not text: 3",
    '{"data": ["\\ud800", "b"]}': "not valid UTF-8",
}
REASONS = [
    "  2 skipped: not valid JSON",
    "  1 skipped: not a JSON object",
    "  1 skipped: none of messages, data, conversations, instruction with output, turns, "
    "and prompt",
    "  2 skipped: no answer",
    "  8 skipped: an unusable turn",
    "  1 skipped: an input that is not text",
]


def test_a_broken_record_is_skipped_five_are_named_and_all_are_counted_by_reason(
    tmp_path, tokenizer, capsys, monkeypatch
):
    path = write(tmp_path / "a", *counting(3), *BROKEN, "", *counting(1))
    assert len(Conversations([str(path)], tokenizer, 96)) == 4
    told = capsys.readouterr().err.splitlines()
    assert told[5:] == [f"4 conversations, {len(BROKEN)} records skipped", *REASONS]
    monkeypatch.setattr(conversations, "MAX_NAMED", 100)
    Conversations([str(path)], tokenizer, 96)
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
    data = Conversations(list(map(str, paths)), tokenizer, 96)
    for i in (999, 0, 789, 301, 300, 299):
        messages, _ = usable_messages(records[i])
        tokens = tokenizer.chat(messages, add_generation_prompt=False)
        assert data[i].tokens.tolist() == tokens[:96]
    tracemalloc.start()
    assert Conversations([str(paths[1])], tokenizer, 96)[400]
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


def test_a_json_array_is_read_as_its_records_one_a_line_would_be(tmp_path, tokenizer, capsys):
    records = [{"data": ["Döner?", f"[{i}], \\ü"]} for i in range(5)] + [{"data": 3}]
    path = tmp_path / "array.json"
    text = json.dumps(records, indent=2, ensure_ascii=False)
    path.write_text("\ufeff \n" + text, encoding="utf-8")  # with a byte order mark
    data = Conversations([str(path)], tokenizer, 96)
    lines = encode(tokenizer, tmp_path / "lines", 96, *records)
    assert len(data) == 5
    for i in range(5):
        assert torch.equal(data[i].tokens, lines[i].tokens)
    named, *_ = capsys.readouterr().err.splitlines()
    assert named.startswith(f"skipped {path}, record 6: none of messages")


def test_the_time_to_read_an_array_grows_with_its_length_only(tmp_path, tokenizer):
    turns = [{"from": "human", "value": "é" * 9}, {"from": "gpt", "value": "an answer " * 100}]
    record = json.dumps({"conversations": turns})
    path = write(tmp_path / "array.json", "[" + ",\n".join([record] * 10_000) + "]")
    began = time.process_time()
    data = Conversations([str(path)], tokenizer, 96)
    assert time.process_time() - began < 5  # a fraction of a second; by its square, minutes
    assert len(data) == 10_000
    assert torch.equal(data[9_999].tokens, data[0].tokens)


def test_an_epoch_is_a_permutation_and_can_be_gone_on_with_at_any_position(tmp_path, tokenizer):
    data = encode(tokenizer, tmp_path / "a", 200, *counting(20))
    indices = {tuple(data[i].tokens.tolist()): i for i in range(20)}
    assert len(indices) == 20

    def walk(position: int) -> list[int]:
        stream = Stream(data, np.arange(5, 15), seed=3, position=position)
        drawn = list(itertools.islice(stream, 25 - position))
        assert stream.position == 25
        return [indices[tuple(conversation.tokens.tolist())] for conversation in drawn]

    order = walk(0)
    assert sorted(order[:10]) == list(range(5, 15))
    assert sorted(order[10:20]) == list(range(5, 15))
    assert order[:10] != order[10:20]
    for position in range(25):
        assert walk(position) == order[position:]


def test_an_epoch_has_as_many_batches_as_it_takes_to_draw_each_conversation(tmp_path, tokenizer):
    data = encode(tokenizer, tmp_path / "a", 200, *counting(10))
    stream = Stream(data, np.arange(10), seed=0)
    assert [stream.batches_per_epoch(size) for size in (1, 3, 5, 10, 11)] == [10, 4, 2, 1, 1]


def test_one_usable_conversation_is_found_in_every_epoch(tmp_path, tokenizer):
    records = [{"data": ["?" * 96, "!"]}] * 10  # nothing of the answer is left
    records[7] = {"data": ["?", "!"]}
    data = encode(tokenizer, tmp_path / "a", 96, *records)
    stream = Stream(data, np.arange(10), seed=0)
    for epoch in range(20):
        assert next(iter(stream)) is data[7]
        assert (stream.position - 1) // 10 == epoch
