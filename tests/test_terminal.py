"""Claims about what a person sees while a prompt is read, and about why an answer ended."""
import time

import pytest

from plumbing import terminal
from plumbing.terminal import PromptBar, WaitingNote, why_stopped


@pytest.mark.parametrize("length, is_shown", [
    (terminal.LONG_PROMPT, True), (terminal.LONG_PROMPT - 1, False)
])
def test_a_long_prompt_has_a_bar_of_which_nothing_is_left(
    length, is_shown, capsys
):
    bar = PromptBar(length)
    bar.update(64)
    bar.update(128)
    assert bar.bar.disable != is_shown
    told = capsys.readouterr().err
    assert ("reading the prompt" in told) == is_shown
    bar.close()
    assert capsys.readouterr().err.strip() == ""  # spaces, where the bar was


def test_a_server_that_sends_nothing_for_a_while_is_explained(capsys, monkeypatch):
    monkeypatch.setattr(terminal, "PATIENCE", 0.05)
    note = WaitingNote()
    note.timer.join()
    note.close()
    assert "waiting for the server to read the prompt" in capsys.readouterr().err


def test_a_server_that_answers_soon_is_not(capsys, monkeypatch):
    monkeypatch.setattr(terminal, "PATIENCE", 0.05)
    note = WaitingNote()
    note.close()
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("tokens, reason", [
    ([3, 4, 0], "stop token"),
    ([3, 0], "stop token"),
    ([3, 4, 5], "max-new-tokens"),
    ([3, 4], "context"),
])
def test_why_an_answer_ended(tokens, reason):
    assert why_stopped(tokens, {0}, max_new_tokens=3) == reason
