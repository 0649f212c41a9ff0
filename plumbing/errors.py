"""User errors, reported in one line.

What the user gives may be missing, damaged or wrong. It is checked once, where it enters. Then the
command ends in one line, which says what is wrong and what to do, and in exit status 2. A traceback
is for bugs. Every script calls its `main` through `run_command`:

    if __name__ == "__main__":
        run_command(main)
"""
from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import Callable, Iterator, NoReturn


class InputError(ValueError):
    """Something the user gave is wrong. The message says what is wrong and what to do."""


@contextmanager
def input_errors(what: object, *kinds: type[Exception]) -> Iterator[None]:
    """Turn exceptions of these kinds into an InputError about `what`.

    Within `with input_errors("a.json", OSError):` an OSError "no such file" becomes an InputError
    "a.json: no such file".
    """
    try:
        yield
    except kinds as error:
        raise InputError(f"{what}: {error}") from None


def fail(message: str) -> NoReturn:
    """End the command with one line and exit status 2."""
    line = " ".join(message.split())
    name = os.path.basename(sys.argv[0])
    print(f"{name}: error: {line[:400]}", file=sys.stderr)
    sys.exit(2)


def run_command(main: Callable[[], None]) -> None:
    """Run a script's main. Bad input ends in one line and status 2."""
    if sys.stderr is None:  # closed: `print` would take stdout instead
        sys.stderr = open(os.devnull, "w")
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's stdout lacks it, a closed one is None
        sys.stdout.reconfigure(errors="replace")  # print "?" for what the encoding cannot express
    try:
        main()
        print(end="", flush=True)  # so that a closed pipe is noticed here
    except BrokenPipeError:  # nobody reads stdout any more
        # Python flushes stdout again when it exits. Let that go nowhere, or it fails again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (InputError, OSError) as error:  # an OSError: the disk is full, for example
        fail(str(error))
    except RuntimeError as error:
        if "allocate" not in str(error):
            raise
        fail(f"not enough memory: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
