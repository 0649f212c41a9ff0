"""Claims about conversations to train on: as tokens, without broken records, and shuffled."""
import json
from pathlib import Path

import pytest
import torch
from conftest import raises
from tiny_models import CHATML, CHATML_TEMPLATE, byte_tokenizer
from tiny_target import CHAT, STOP, counting, make_tiny_target, write

from plumbing.conversations import Conversations, hold_out
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
    assert (len(training), len(held_out)) == (18, 2)
    texts = {tokenizer.decode(one.tokens.tolist()) for one in training}
    assert len(texts) == 18
    assert not texts & {tokenizer.decode(one.tokens.tolist()) for one in held_out}


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


BROKEN = {  # a line, and what is wrong with it
    "{half": "not valid JSON",
    '"text"': "not a JSON object",
    '{"data": 3}': "none of messages",
    '{"messages": []}': "no answer",
    '{"messages": [3]}': "a turn has no role",
    '{"messages": [{"role": "user", "content": " "}]}': "an empty turn",
    '{"data": ["\\ud800", "b"]}': "a turn is not valid UTF-8",
}
AGAIN = [  # lines with the same faults
    '{"a":' + "[" * 100_000,
    '{"instruction": "a", "input": 3, "output": "b"}',
    '{"data": ["a question"]}',
    '{"data": ["a", 3]}',
    '{"conversations": [{"from": "nobody", "value": ""}, 3]}',
    '{"conversations": [{"from": ["user"], "value": ""}]}',
    '{"messages": [{"role": "user"}]}',
    '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
    '{"instruction": "a", "output": null}',
]


def test_a_broken_record_is_skipped_and_each_kind_is_counted_with_an_example(
    tmp_path, tokenizer, capsys
):
    path = write(tmp_path / "a", *counting(3), *BROKEN, "", *AGAIN, *counting(4)[3:])
    assert len(Conversations([path], tokenizer, 96)) == 4
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"4 conversations, {len(BROKEN) + len(AGAIN)} records skipped"
    counts = (2, 1, 2, 2, 7, 1, 1)
    for number, line, count, why in zip(range(4, 11), told[1:], counts, BROKEN.values()):
        assert line.startswith(f"  {count} like {path}, line {number}: {why}")
        assert len(line) < 500
    assert len(told) == 1 + len(BROKEN)


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
