"""The target writes its own training data, and an interruption costs none of it."""
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import Done
from conftest import ROOT
from test_bench import assert_refused, command, fork
from tiny_models import CHATML, CHATML_TEMPLATE, ask, byte_tokenizer
from tiny_target import CHAT, STOP, make_tiny_target, write

from app.loading import load_model
from experiments import synthesize
from experiments.batching import Request
from experiments.prompts import read_first_questions
from experiments.synthesize import SynthesisConfig
from llama import Llama
from plumbing.conversations import Conversations
from plumbing.errors import InputError
from plumbing.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def target(tiny) -> Llama:
    return load_model(tiny)


@pytest.fixture(scope="module")
def tokenizer(tiny) -> Tokenizer:
    return load_tokenizer(tiny)


@pytest.fixture
def run(tiny):
    """The program on the tiny target, in this process."""

    def synthesize_into(path: Path, count: int, *flags) -> Done:
        return command(synthesize, *arguments(tiny, path, count, *flags))

    return synthesize_into


def arguments(tiny: Path, path: Path, count: int, *flags) -> list:
    sizes = ["--device", "cpu", "--seq-len", 96, "--batch-size", 3]
    return [count, "--out", path, "--model", tiny, *sizes, *flags]


def written(path: Path) -> list[list[dict]]:
    return [json.loads(line)["messages"] for line in path.read_bytes().splitlines()]


def first_messages(path: Path) -> list[str]:
    return [messages[0]["content"] for messages in written(path)]


# --- Conversations ---


def converse(
    target: Llama | None, tokenizer: Tokenizer, questions: list[str] | None, seq_len: int = 200
) -> list[list[dict]]:
    """The conversations in the order in which they end: one, or one for each question."""
    wanted = 1 if questions is None else len(questions)
    config = SynthesisConfig(batch_size=4, seq_len=seq_len)
    return list(synthesize.converse(target, tokenizer, questions, wanted, config))


class ScriptedBatch:
    """Writes the turns that it is told, one at a time, and notes what it is asked for."""

    def __init__(self, turns: list[list[int]]):
        self.turns = iter(turns)
        self.asked = []
        self.requests = []

    def add_all(self, requests) -> None:
        for key, prompt, config in requests:
            self.asked.append((prompt, config))
            self.requests.append(Request(key, config, None, next(self.turns)))

    def step(self) -> list[Request]:
        ended = self.requests
        self.requests = []
        return ended


def test_a_conversation_takes_turns_and_keeps_an_answer_that_is_cut_short_but_no_question(
    target, tokenizer, monkeypatch
):
    monkeypatch.setattr(synthesize, "NEXT_TURN", 1.0)
    told = [[*tokenizer.encode(message["content"]), STOP] for message in CHAT]
    cut = tokenizer.encode("It")
    cut_answer = [CHAT[0], {"role": "assistant", "content": "It"}]
    question = CHAT[0]["content"]
    for questions, turns, expected in (
        (None, [*told, [STOP]], [CHAT]),
        (None, [*told, cut], [CHAT]),
        ([question], [[STOP]], []),
        ([question], [cut], [cut_answer]),
    ):
        batch = ScriptedBatch(turns)
        monkeypatch.setattr(synthesize, "Batch", lambda *_: batch)
        assert converse(target, tokenizer, questions) == expected
        assert len(batch.asked) == len(turns)
        begun = 0 if questions is None else 1  # messages
        for i, (prompt, config) in enumerate(batch.asked, begun):
            role = ("user", "assistant")[i % 2]
            opening = tokenizer.encode_markup(f"<|im_start|>{role}\n")
            assert prompt == tokenizer.chat(CHAT[:i], add_generation_prompt=False) + opening
            assert len(prompt) + config.max_new_tokens == 200
            assert config.stop_ids == {STOP}
            assert config.temperature in synthesize.TEMPERATURES[role]
    # 31 tokens are left: no room for a question. And none to answer one that is cut.
    for question, expected in ((question, [CHAT[:2]]), ("long" * 50, [])):
        batch = ScriptedBatch(told[1:])
        assert converse(target, tokenizer, [question], seq_len=80) == expected
    batch = ScriptedBatch([cut])
    monkeypatch.setattr(synthesize, "MAX_BARREN", 1)
    with pytest.raises(InputError, match="1 conversations in a row had no answer"):
        converse(target, tokenizer, None)


def test_a_question_follows_what_the_template_writes_before_it(tmp_path):
    byte_tokenizer(tmp_path, CHATML)
    default = "<|im_start|>system\nYou're of help.<|im_end|>\n"
    (tmp_path / "chat_template.jinja").write_text(default + CHATML_TEMPLATE)
    tokenizer = load_tokenizer(tmp_path)
    opening = "<|im_start|>user\n"
    first = synthesize.question_prompt(tokenizer, [])
    assert tokenizer.backend.decode(first, skip_special_tokens=False) == default + opening
    written = tokenizer.chat(CHAT, add_generation_prompt=False)
    later = synthesize.question_prompt(tokenizer, CHAT)
    assert later == written + tokenizer.encode_markup(opening)


def test_a_conversation_written_in_a_batch_is_the_one_written_alone(
    target, tokenizer, monkeypatch
):
    monkeypatch.setitem(synthesize.TEMPERATURES, "assistant", (0.0,))
    monkeypatch.setattr(synthesize, "NEXT_TURN", -1.0)
    questions = [f"Number {i}?" * (1 + i % 3) for i in range(9)]
    together = converse(target, tokenizer, questions, seq_len=120)
    alone = []
    for question in questions:
        alone += converse(target, tokenizer, [question], seq_len=120)
    assert sorted(together, key=str) == sorted(alone, key=str)


# --- The file ---


def test_the_target_writes_its_own_training_data_and_answers_questions(tmp_path, run, tokenizer):
    records = [{"data": [f"Count to {i % 9}.", "1"]} for i in range(18)]
    questions = tmp_path / "questions.json"
    questions.write_text(json.dumps(records))  # an array will do
    asked = set(read_first_questions(questions))
    assert len(asked) == 9
    own = tmp_path / "own"
    answers = tmp_path / "answers"
    assert "7 of 7 conversations" in run(own, 7).err
    run(answers, 7, "--questions", questions)
    for path in (own, answers):
        assert len(written(path)) == 7
        for messages in written(path):
            roles = [message["role"] for message in messages]
            assert roles == (["user", "assistant"] * 20)[:len(roles)]
        different = set(map(str, written(path)))  # so tiny a target may repeat itself
        assert len(Conversations([path], tokenizer, 200)) == len(different)  # to train on
    assert set(first_messages(answers)) <= asked
    assert not set(first_messages(own)) <= asked
    for _ in range(6):  # an answer may come out empty
        done = run(answers, 99, "--questions", questions, "--json")
    assert sorted(first_messages(answers)) == sorted(asked)
    assert "there are no more questions" in done.err
    for done in (done, run(answers, 3, "--json")):
        assert json.loads(done.out) == {"conversations": 9}


def test_a_file_cut_anywhere_and_continued_repeats_and_loses_nothing(
    tmp_path, run, monkeypatch
):
    path = tmp_path / "own"

    def answer_some(target, tokenizer, questions, count, config):
        """Conversations that hold their question or seed; none for "b"."""
        if questions is None:
            questions = [f"{config.seed} {i}" for i in range(count)]
        answered = [question for question in questions if question != "b"]
        for question in answered[:count]:
            yield [*ask(question), {"role": "assistant", "content": "Ä"}]
            assert first_messages(path)[-1] == question  # at once

    monkeypatch.setattr(synthesize, "converse", answer_some)
    run(path, 3)
    first = path.read_bytes()
    cuts = {*range(0, len(first) + 1, 9), first.index(b"\n"), len(first) - 1}
    for cut in sorted(cuts):
        path.write_bytes(first[:cut])
        run(path, 6)
        lines = path.read_bytes().splitlines()
        complete = first[:cut].count(b"\n")
        assert len(set(lines)) == len(written(path)) == 6
        assert lines[:complete] == first.splitlines()[:complete]
    path.unlink()
    questions = write(tmp_path / "questions", *({"data": [q]} for q in "ab\ud83dcbd"))
    for count in (1, 2, 9):
        run(path, count, "--questions", questions)
        path.write_bytes(path.read_bytes()[:-1])  # the last line is not complete
    run(path, 9, "--questions", questions)
    assert first_messages(path) == ["a", "c", "d"]


def test_questions_may_be_prompts_of_the_benchmark(tmp_path, run):
    asked = [{"prompt": "One?"}, {"category": "a", "turns": ["Two?", "Three?"]}]
    questions = write(tmp_path / "prompts.jsonl", *asked)
    for _ in range(6):  # an answer may come out empty
        run(tmp_path / "own", 2, "--questions", questions)
    assert sorted(first_messages(tmp_path / "own")) == ["One?", "Two?"]


@pytest.mark.parametrize("with_questions", [False, True])
def test_synthesis_killed_at_any_moment_and_resumed_loses_doubles_and_breaks_no_line(
    tmp_path, tiny, run, with_questions
):
    path = tmp_path / "own"
    draws = random.Random(0)
    flags = ["--batch-size", 8]
    if with_questions:
        records = [{"data": [f"Count to {i}.", "1"]} for i in range(150)]
        flags += ["--questions", write(tmp_path / "questions", *records)]
    path.touch()
    lines = []
    for more in (0, 1, 10, 5):
        before = lines
        process = fork(synthesize, tmp_path, *arguments(tiny, path, 50, *flags))
        while process.is_alive() and path.read_bytes().count(b"\n") < len(before) + more:
            time.sleep(draws.uniform(0, 0.01))
        process.kill()
        process.join()
        lines = path.read_bytes().splitlines(keepends=True)
        assert lines[:len(before)] == before
        assert len(lines) < 50
    run(path, 50, *flags)
    assert path.read_bytes().splitlines(keepends=True)[:len(lines)] == lines
    assert len(written(path)) == 50
    # Of the target's own questions, short ones come up again by chance.
    texts = [text for text in first_messages(path) if with_questions or len(text) > 5]
    assert len(texts) == len(set(texts)) > 10


def test_ctrl_c_ends_synthesis_with_what_it_wrote_and_how_to_go_on(tmp_path, tiny):
    path = tmp_path / "own"
    path.touch()
    program = [sys.executable, "-m", "experiments.synthesize"]
    flags = map(str, arguments(tiny, path, 100_000))
    process = subprocess.Popen(
        [*program, *flags], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    while process.poll() is None and path.read_bytes().count(b"\n") < 2:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert_says_how_to_go_on(told, path)


def test_sigterm_ends_synthesis_with_what_it_wrote_and_how_to_go_on(tmp_path, tiny):
    path = tmp_path / "own"
    path.touch()
    process = fork(synthesize, tmp_path, *arguments(tiny, path, 100_000))
    while process.is_alive() and path.read_bytes().count(b"\n") < 2:
        time.sleep(0.01)
    process.terminate()
    process.join(60)
    assert process.exitcode == 128 + signal.SIGTERM
    assert_says_how_to_go_on((tmp_path / "err").read_text(), path)


def assert_says_how_to_go_on(told: str, path: Path) -> None:
    count = len(written(path))  # all lines are whole
    assert f"{count} of 100000 conversations are in {path}: the same command goes on" in told
    assert "Traceback" not in told


# --- Bad input ---


@pytest.mark.parametrize("choices, why", [
    ("2 --out other", "was not written by this program"),
    ("2 --out folder", "folder: is a folder"),
    ("2 --out own --questions nowhere", "nowhere: "),
    ("2 --out own --questions questionless", "no conversation with a question"),
    ("3 --out answers --questions long", "there are no more questions"),
    ("22 --out own --seq-len 16 --batch-size 10", "raise --seq-len above 16"),
    ("2 --out own --seq-len 100000", "context is 256"),
    ("0 --out own", "COUNT: expected a whole number, at least 1"),
    ("2", "--out"),
])
def test_bad_input_ends_in_one_line_and_changes_no_file(
    tmp_path, tiny, monkeypatch, choices, why
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(synthesize, "MAX_BARREN", 20)
    (tmp_path / "folder").mkdir()
    write(tmp_path / "other", {"messages": CHAT})
    write(tmp_path / "own", {"synthetic": True, "messages": CHAT})
    write(tmp_path / "questionless", {"data": [""]})
    write(tmp_path / "long", {"data": ["long " * 300, "1"]})
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    defaults = ["--model", tiny, "--seq-len", 96]
    assert_refused(command(synthesize, *defaults, *choices.split()), why)
    for path, content in before.items():
        assert path.read_bytes() == content
