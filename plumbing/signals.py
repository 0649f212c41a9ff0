"""Ctrl-C, SIGTERM and SIGHUP: let a program finish what it is doing before it stops."""
from __future__ import annotations

import os
import signal
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Notes that the program was asked to stop: by Ctrl-C (SIGINT), by SIGTERM, which Slurm,
    Kubernetes and `timeout` send, or by SIGHUP (the terminal was closed). The program reads
    `received` wherever it is able to stop.

        with StopSignals("stopping after this batch") as signals:
            for batch in batches:
                ...
                if signals.received:
                    save()
                    signals.end_program()

    Only the first signal, of any kind, is noted. After that, Ctrl-C raises KeyboardInterrupt at
    once, and the others have no further effect. (SIGTERM may arrive twice: Slurm sends SIGTERM to
    torchrun and to each process that torchrun started, and torchrun forwards its own SIGTERM to
    these processes.) A signal that the program was started to ignore, as by nohup, stays ignored.
    """

    def __init__(self, message: str):
        self.message = message  # printed when the first signal arrives; may change until then
        self.received: int | None = None  # the number of the first signal

    def __enter__(self) -> StopSignals:
        self.previous = {}
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
        number = self.received
        if number is None:  # another process of the same training has received it
            number = signal.SIGINT
        raise SystemExit(128 + number)
