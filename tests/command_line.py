"""Runs speculate.py and llama.py in this process, as a command line would."""
import io
import sys
from typing import NamedTuple

import pytest

from app import llama_command, speculate_command
from plumbing import terminal

COMMANDS = {"speculate.py": speculate_command, "llama.py": llama_command}


class Done(NamedTuple):
    """A command line that has run."""

    status: int
    out: str
    err: str


class Screen(io.TextIOWrapper):
    """A standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


class Typed(io.StringIO):
    """A standard input that is a terminal, at which these lines are typed one by one."""

    def isatty(self) -> bool:
        return True


def command(
    *arguments: object,
    script: str = "speculate.py",
    stdin: io.StringIO | None = None,
    stdout: type[io.TextIOWrapper] = io.TextIOWrapper,
) -> Done:
    """Run a script. By default its streams are no terminals."""
    out = stdout(io.BytesIO(), "utf-8", newline="")
    err = io.StringIO()
    status = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, "--device", "cpu", *map(str, arguments)])
        patch.setattr(sys, "stdin", stdin or io.StringIO())
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        patch.setattr(terminal, "more_is_pasted", lambda: False)  # it asks a real terminal
        try:
            COMMANDS[script].main()
        except SystemExit as end:
            status = end.code
    out.flush()
    return Done(status, out.buffer.getvalue().decode(), err.getvalue())


def refused(done: Done, complaint: str) -> None:
    """The command has ended in one line and status 2."""
    assert done.status == 2 and done.out == ""
    assert done.err.count("\n") == 1 and complaint in done.err
