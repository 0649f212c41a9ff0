"""Claims about prompts: given, piped in, and fitted into the context."""
import io
import sys

import pytest
from conftest import case_name, raises
from tiny_target import CHAT

from plumbing.prompts import answer_length, drop_oldest_exchanges, given_or_piped


@pytest.mark.parametrize("room, kept, line", [
    (60, 0, ""),
    (30, 2, "the context is full: the oldest questions are left out (1)\n"),
    (15, 4, "the context is full: the oldest questions are left out (2)\n"),
    (5, 4, "the context is full: the oldest questions are left out (2)\n"),
])
def test_the_oldest_questions_and_answers_make_room_for_an_answer_but_the_last_question_stays(
        room, kept, line, capsys):
    def count_characters(messages: list[dict]) -> int:
        return sum(len(message["content"]) for message in messages)

    messages = [*CHAT, {"role": "user", "content": "Thanks."}]  # 14 + 8 + 6 + 14 + 7 characters
    assert drop_oldest_exchanges(messages, count_characters, 60, 60 - room) == messages[kept:]
    assert capsys.readouterr().err == line


def test_a_prompt_that_leaves_no_room_in_the_context_is_an_input_error(capsys):
    raises("512 tokens", answer_length, 512, 512, 1)
    assert answer_length(512, 510, 64) == 2
    assert "room for 2" in capsys.readouterr().err


def test_a_given_prompt_is_taken_as_it_is_and_a_piped_one_without_its_last_line_break(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n two\nlines \n\n"))
    assert given_or_piped(" Hi\n") == " Hi\n"
    assert given_or_piped(None) == "\n two\nlines \n"


@pytest.mark.parametrize("piped, culprit", [
    (b"", "the prompt is empty"), (b" \n\n", "the prompt is empty"), (b"\xff", "not valid text"),
], ids=case_name)
def test_a_piped_prompt_that_is_empty_or_no_text_is_an_input_error(piped, culprit, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped), "utf-8"))
    raises(culprit, given_or_piped, None)
