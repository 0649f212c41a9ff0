"""Errors that are not bugs end a command in one line and exit status 2. Bugs show a traceback.

Every command line runs in `run_command`:

    if __name__ == "__main__":
        run_command(main)

What the user gives may be missing, damaged or wrong. It is checked once, where it enters the
program, and an InputError says what is wrong and what to do. The machine may also lack something:
room on a disk, the permission to read a file, or memory. For all of these except memory Python
raises an OSError, whose message names the cause and the file. Every OSError therefore ends a
command in one line. (The price: a bug that opens a wrong file shows no traceback.) If memory is
short, Python raises a MemoryError, and PyTorch a RuntimeError that `is_out_of_memory` recognizes.
"""
from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import Callable, Iterator, NoReturn

import torch

from plumbing.terminal import PICTURES

MAX_MESSAGE = 400  # characters; an error of another library may quote a whole file


class InputError(ValueError):
    """Something the user gave is wrong. The message says what is wrong and what to do."""


@contextmanager
def input_errors(what: object, *kinds: type[Exception]) -> Iterator[None]:
    """Turn exceptions of these kinds into an InputError about `what`.

    Within `with input_errors("a.json", ValueError):` a ValueError "no number" becomes an InputError
    "a.json: no number".
    """
    try:
        yield
    except kinds as error:
        raise InputError(f"{what}: {explain(error)}") from None


def explain(error: Exception) -> str:
    """Return what an exception says. An error of the operating system becomes plain words: of
    "[Errno 2] No such file or directory: 'a.json'" only "no such file or folder" is left."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower().replace("directory", "folder")
    return str(error)


def run_command(main: Callable[[], None]) -> None:
    """Run a script's main. Errors that are not bugs end the script in one line and status 2. Ctrl-C
    (status 130) and a closed pipe (status 1) end it silently."""
    if sys.stderr is None:  # stderr is closed; `print` would then write to stdout
        sys.stderr = open(os.devnull, "w")
    if hasattr(sys.stdout, "reconfigure"):  # a closed stdout is None
        sys.stdout.reconfigure(errors="replace")  # print "?" for what the encoding cannot express
    try:
        main()
        print(end="", flush=True)  # so that a closed pipe is noticed here
    except BrokenPipeError:  # stdout is a pipe that is no longer read
        # Python flushes stdout again when it exits. The null device keeps that from failing again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except InputError as error:
        fail(str(error))
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        fail(place + explain(error))
    except FloatingPointError as error:  # NaN or infinite logits, in a target's or a drafter's pass
        fail(f"{error}: use --dtype bfloat16 or float32")
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        fail(f"not enough memory: {error}")
    except MemoryError:  # usually has no message
        fail("not enough memory")
    except KeyboardInterrupt:
        sys.exit(130)


def fail(message: str) -> NoReturn:
    """End the command with exit status 2 and with a message, on one line of MAX_MESSAGE characters
    or a few more."""
    line = " ".join(message.split())
    if len(line) > MAX_MESSAGE:
        line = line[:MAX_MESSAGE] + " ..."
    name = os.path.basename(sys.argv[0])
    print(f"{name}: error: {line.translate(PICTURES)}", file=sys.stderr)
    sys.exit(2)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether PyTorch had too little memory. On CUDA devices the error has a type of its
    own. On other devices only the message tells: "can't allocate memory: you tried to allocate 8
    bytes"."""
    return isinstance(error, torch.OutOfMemoryError) or "tried to allocate" in str(error).lower()
