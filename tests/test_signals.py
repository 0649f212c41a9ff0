"""Claims about Ctrl-C and SIGTERM: a program finishes a step and stops, or stops at once."""
import signal

import pytest

from plumbing.signals import SIGNALS, StopSignals


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_ends_the_program_when_the_program_says_so(number, capfd):
    with StopSignals("stopping after this batch") as signals:
        assert signals.received is None
        signal.raise_signal(number)
        assert signals.received == number
        line = "stopping after this batch (Ctrl-C now stops at once)"
        assert capfd.readouterr().err == f"\n{line}\n"
        with pytest.raises(SystemExit) as end:
            signals.end_program()
    assert end.value.code == 128 + number


@pytest.mark.parametrize("first", SIGNALS)
def test_after_the_first_signal_sigterm_has_no_effect_and_ctrl_c_stops_at_once(first, capfd):
    with StopSignals("stopping") as signals:
        signal.raise_signal(first)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert signals.received == first
    assert capfd.readouterr().err.count("stopping") == 1


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
