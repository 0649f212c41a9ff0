"""Claims about what a person sees while they wait and of control characters, and about why an
answer ended."""
import sys

import pytest

from plumbing.terminal import printable, quote, waiting_line, why_stopped


def test_a_terminal_shows_what_is_waited_for_until_it_is_done_and_a_pipe_does_not(
    capsys, monkeypatch
):
    with waiting_line("loading ..."):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with waiting_line("loading ..."):
        assert capsys.readouterr().err == "loading ..."
    assert capsys.readouterr().err == "\r\033[K"


def test_a_terminal_is_sent_no_character_that_it_obeys_and_a_file_gets_all(monkeypatch):
    obeyed = [chr(code) for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"]
    harmless = "\tnaïve\n日本語 👩‍👩‍👧"
    assert printable("".join(obeyed)) == "".join(obeyed)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert printable(harmless) == harmless
    assert printable("\x1b[2J") == "␛[2J"
    for shown in (printable("".join(obeyed)), quote("".join(obeyed[40:50]))):
        assert not set(shown) & set(obeyed)


def test_a_control_token_is_not_drawn_as_text_and_part_of_a_character_is_not_drawn_as_one():
    assert quote("", "<control>") == "<control>"
    assert quote("<control>") == '"<control>"'
    assert quote("") == '""'


@pytest.mark.parametrize("tokens, reason", [
    ([3, 4, 0], "stop token"),
    ([3, 0], "stop token"),
    ([3, 4, 5], "max-new-tokens"),
    ([3, 4], "context"),
])
def test_why_an_answer_ended(tokens, reason):
    assert why_stopped(tokens, {0}, max_new_tokens=3) == reason
