"""Signals that ask a training to stop: it finishes its update, saves, and ends.

Such a signal is Ctrl-C (SIGINT), SIGTERM, which Slurm, Kubernetes and `timeout` send, or SIGHUP,
which comes when a terminal is closed. app/training.py and experiments/toy.py train like this:

    with StopSignals("stopping after this update") as signals:
        for update in range(updates):
            ...
            if signals.received:
                save()
                signals.end_program()
"""
from __future__ import annotations

import os
import signal
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Notes the first signal, which the program looks up in `received` wherever it is able to stop.

    After that, Ctrl-C raises KeyboardInterrupt at once, and the others have no further effect.
    (SIGTERM may arrive twice: Slurm sends SIGTERM to torchrun and to each process that torchrun
    started, and torchrun forwards its own SIGTERM to these processes.) A signal that the program
    was started to ignore, as by nohup, stays ignored.
    """

    def __init__(self, message: str):
        self.message = message  # printed when the first signal arrives; may change until then
        self.received: int | None = None  # the number of the first signal
        self.previous = {}  # the handlers that were there before

    def __enter__(self) -> StopSignals:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self.previous[number] = signal.signal(number, self.receive)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def receive(self, number: int, _) -> None:
        if signal.SIGINT in self.previous:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.received is not None:
            return
        self.received = number
        try:
            # The signal may interrupt a `print`, which cannot be called again within itself.
            # os.write can be called at any time.
            os.write(2, f"\n{self.message} (Ctrl-C now stops at once)\n".encode())
        except OSError:  # the terminal is gone: what is still printed goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)

    def end_program(self) -> NoReturn:
        """Raise SystemExit with the status that a shell reports for a program that a signal ended:
        128 + the signal's number."""
        # Without a number, another process of the same training has received the signal.
        raise SystemExit(128 + (self.received or signal.SIGINT))
