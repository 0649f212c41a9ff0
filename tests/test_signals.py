"""Claims about Ctrl-C and SIGTERM: a program finishes what it does, and a second Ctrl-C ends it."""
import signal

import pytest

from plumbing.signals import SIGNALS, StopSignals


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_ends_the_program_when_the_program_says_so(number, capfd):
    with StopSignals("stopping after this batch") as signals:
        assert signals.received is None
        signal.raise_signal(number)
        assert signals.received == number
        assert capfd.readouterr().err == "\nstopping after this batch (Ctrl-C again: at once)\n"
        with pytest.raises(SystemExit) as end:
            signals.end_program()
    assert end.value.code == 128 + number


def test_a_second_ctrl_c_is_not_waited_for_and_a_second_sigterm_is():
    with StopSignals("stopping") as signals:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert signals.received == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_process_that_got_no_signal_ends_as_after_ctrl_c():
    with pytest.raises(SystemExit) as end:
        StopSignals("stopping").end_program()
    assert end.value.code == 130


def test_afterwards_signals_do_what_they_did_before():
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopSignals("stopping"):
        assert [signal.getsignal(number) for number in SIGNALS] != before
        signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in SIGNALS] == before
