"""Ctrl-C and SIGTERM: let a program finish what it is doing before it stops."""
from __future__ import annotations

import os
import signal
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Notes that the program was asked to stop: by Ctrl-C (SIGINT), or by SIGTERM, which Slurm,
    Kubernetes and `timeout` send. The program looks at `received` when it suits it.

        with StopSignals("stopping after this batch") as signals:
            for batch in batches:
                ...
                if signals.received:
                    save()
                    signals.end_program()

    A second Ctrl-C raises KeyboardInterrupt at once. A second SIGTERM has no further effect: Slurm
    sends one to torchrun and one to each process that torchrun started, and torchrun forwards its
    own to these processes, which therefore receive two.
    """

    def __init__(self, message: str):
        self.message = message  # printed when a signal arrives
        self.received: int | None = None  # the signal's number

    def __enter__(self) -> StopSignals:
        self.previous = {number: signal.signal(number, self.receive) for number in SIGNALS}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def receive(self, number: int, _) -> None:
        self.received = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # The signal may interrupt a `print`, which cannot be called again within itself. os.write
        # can be called at any time.
        os.write(2, f"\n{self.message} (Ctrl-C again: at once)\n".encode())

    def end_program(self) -> NoReturn:
        """Raise SystemExit with the status that a shell reports for a program that a signal ended:
        128 + the signal's number."""
        number = self.received
        if number is None:  # another process of the same run has received it
            number = signal.SIGINT
        raise SystemExit(128 + number)
