"""Claims about prompts: given, piped in, and fitted into the context."""
import io
import sys

import pytest
from conftest import case_name, raises

from plumbing.prompts import answer_length, given_or_piped


def test_a_prompt_that_leaves_no_room_in_the_context_is_an_input_error(capsys):
    raises("512 tokens", answer_length, 512, 512, 1)
    assert answer_length(512, 510, 64) == 2
    assert "room for 2" in capsys.readouterr().err


def test_a_given_prompt_is_taken_as_it_is_and_a_piped_one_without_its_last_line_break(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n two\nlines \n\n"))
    assert given_or_piped(" Hi\n") == " Hi\n"
    assert given_or_piped(None) == "\n two\nlines \n"


def test_a_given_prompt_that_is_no_text_is_an_input_error():
    raises("the prompt is not valid UTF-8", given_or_piped, "a\udcff")


@pytest.mark.parametrize("piped, culprit", [
    (b"", "the prompt is empty"), (b" \n\n", "the prompt is empty"), (b"\xff", "not valid text"),
], ids=case_name)
def test_a_piped_prompt_that_is_empty_or_no_text_is_an_input_error(piped, culprit, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped), "utf-8"))
    raises(culprit, given_or_piped, None)
