"""Claims about signals to stop: a program finishes a step and stops, or stops at once."""
import os
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
def test_after_the_first_signal_only_ctrl_c_has_an_effect_and_stops_at_once(first, capfd):
    with StopSignals("stopping") as signals:
        signal.raise_signal(first)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)
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


def test_a_signal_that_the_program_was_started_to_ignore_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as by nohup
    try:
        with StopSignals("stopping") as signals:
            signal.raise_signal(signal.SIGHUP)
            assert signals.received is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_after_the_terminal_was_closed_the_program_can_still_print_and_go_on():
    ours = os.dup(2)
    terminal, our_end = os.openpty()
    try:
        os.dup2(our_end, 2)
        os.close(terminal)
        with pytest.raises(OSError):
            os.write(2, b"lost")
        with StopSignals("stopping") as signals:
            signal.raise_signal(signal.SIGHUP)
        os.write(2, b"saved")
        assert signals.received == signal.SIGHUP
    finally:
        os.dup2(ours, 2)
