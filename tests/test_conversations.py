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
from tiny_models import CHATML, CHATML_TEMPLATE, ask, byte_tokenizer
from tiny_target import CHAT, STOP, counting, make_tiny_target, write

from plumbing.conversations import Conversations, Stream, hold_out
from plumbing.records import find_records
from plumbing.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return load_tokenizer(make_tiny_target(tmp_path_factory.mktemp("tiny")))


def encode(tokenizer: Tokenizer, path: Path, seq_len: int, *records) -> Conversations:
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


def test_an_epoch_is_a_pass_over_what_can_be_trained_on_and_a_line_says_what_cannot(
    tmp_path, tokenizer, capsys
):
    records = counting(20)
    for i in range(180):
        records.append({"data": ["long" * 60, f"answer {i}"]})
    records += counting(5)  # again
    data = encode(tokenizer, tmp_path / "a", 200, *records)
    assert capsys.readouterr().err.splitlines() == [
        "20 conversations, 185 records skipped",
        f"  180 like {tmp_path / 'a'}, line 21: no answer within --seq-len 200 tokens",
        f"  5 like {tmp_path / 'a'}, line 201: equal to an earlier one",
    ]
    training, held_out = hold_out(data, seed=0)
    assert len(held_out) == 2
    stream = Stream(data, training, seed=0)
    assert stream.batches_per_epoch(3) == 6
    texts = [tokenizer.decode(one.tokens.tolist()) for one in itertools.islice(stream, 18)]
    assert len(set(texts)) == 18
    assert not set(texts) & {tokenizer.decode(one.tokens.tolist()) for one in held_out}


@pytest.mark.parametrize("room, is_usable", [(1, False), (2, True)])
def test_two_tokens_of_an_answer_can_be_trained_on(tmp_path, tokenizer, room, is_usable):
    opening = len(tokenizer.chat(CHAT[:1]))
    if is_usable:
        data = encode(tokenizer, tmp_path / "a", opening + room, {"messages": CHAT})
        assert data[0].answer.sum() == 2
    else:
        raises("no usable conversation", encode, tokenizer, tmp_path / "a", opening + room,
               {"messages": CHAT})


def test_what_begins_a_conversation_is_no_answer(tmp_path, tokenizer):
    greeting = {"role": "assistant", "content": "Hello!"}
    data = encode(tokenizer, tmp_path / "a", 200, {"messages": [greeting, *CHAT[:2]]})
    text = tokenizer.decode(data[0].tokens[data[0].answer].tolist())
    assert text == CHAT[1]["content"]
    assert "Hello!" in tokenizer.decode(data[0].tokens.tolist())


def test_a_template_that_fails_or_rewrites_turns_is_an_input_error_in_training(tmp_path):
    byte_tokenizer(tmp_path, CHATML)
    for template, why in (
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        (CHATML_TEMPLATE.replace("message['content']", "'[…]'"), "rewrites turns"),
    ):
        (tmp_path / "chat_template.jinja").write_text(template)
        raises(why, encode, load_tokenizer(tmp_path), tmp_path / "a", 200, *counting(3))


def test_a_file_that_has_changed_is_an_input_error_that_names_it(tmp_path, tokenizer):
    data = encode(tokenizer, tmp_path / "a", 200, *counting(3))
    write(tmp_path / "a", "\n" * 1000)
    raises(f"{tmp_path / 'a'} has changed since", data.__getitem__, 2)


BROKEN = {  # a line, and what is wrong with it
    "{half": "not valid JSON: Expecting",
    '"text"': "not a JSON object",
    '{"data": 3}': "none of messages",
    '{"messages": []}': "no answer",
    '{"messages": [3]}': "an unusable turn",
    '{"instruction": "a", "input": 3, "output": "b"}': "an input that is not text: 3",
    '{"messages": [{"role": "user", "content": " "}]}': "an empty turn",
}
AGAIN = [  # lines with the same faults
    '{"a":' + "[" * 100_000,
    '{"data": ["a question"]}',
    '{"data": ["a", 3]}',
    '{"conversations": [{"from": "nobody", "value": ""}, 3]}',
    '{"conversations": [{"from": ["user"], "value": ""}]}',
    '{"messages": [{"role": "user"}]}',
    '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
    '{"instruction": "a", "output": null}',
    '{"data": ["\\ud800", "b"]}',
]


def test_a_broken_record_is_skipped_and_each_kind_is_counted_with_an_example(
    tmp_path, tokenizer, capsys
):
    path = write(tmp_path / "a", *counting(3), *BROKEN, "", *AGAIN, *counting(4)[3:])
    assert len(Conversations([path], tokenizer, 96)) == 4
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"4 conversations, {len(BROKEN) + len(AGAIN)} records skipped"
    counts = (2, 1, 1, 2, 8, 1, 1)
    for number, line, count, why in zip(range(4, 11), told[1:], counts, BROKEN.values()):
        assert line.startswith(f"  {count} like {path}, line {number}: {why}")
        assert len(line) < 500
    assert len(told) == 1 + len(BROKEN)


def test_lines_of_large_files_are_read_where_they_are(tmp_path, tokenizer):
    records = []
    for i in range(1000):  # 10 MB
        records.append({"data": [f"ö{'?' * (i % 9)}", f"answer {i}" + "b" * 10_000]})
    paths = [write(tmp_path / "a", *records[:301], "{"), write(tmp_path / "b", *records[301:])]
    data = Conversations(list(map(str, paths)), tokenizer, 96)
    for i in (999, 0, 789, 301, 300, 299):
        question, answer = records[i]["data"]
        messages = [*ask(question), {"role": "assistant", "content": answer}]
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
    assert f"  1 like {path}, record 6: none of messages" in capsys.readouterr().err


def test_the_time_to_read_an_array_grows_with_its_length_only(tmp_path):
    turns = [{"from": "human", "value": "é" * 9}, {"from": "gpt", "value": "an answer " * 100}]
    record = json.dumps({"conversations": turns})
    path = write(tmp_path / "array.json", "[" + ",\n".join([record] * 10_000) + "]")
    began = time.process_time()
    assert len(list(find_records(path))) == 10_000
    assert time.process_time() - began < 5  # a fraction of a second; by its square, minutes


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
