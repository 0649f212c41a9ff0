"""Command lines: flags that scripts share, types of values, and a parser whose errors are one line.

The command lines of app/ and experiments/ are made of this:

    parser = Parser(description="Train a drafter.", examples="python train.py --data chats.jsonl")
    parser.add_argument("--out", type=path)
    parser.add_argument("--updates", type=positive_int)
    add_model_arguments(parser.add_argument_group("model"))

Every value is checked as it enters the program: `argparse` calls the type of the argument, and an
error that the type raises becomes one line, which says what was expected.
"""
from __future__ import annotations

import argparse
import math
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Callable, Iterable, NoReturn

import torch

from plumbing.devices import DTYPES
from plumbing.errors import fail
from plumbing.hub import DEFAULT_MODEL, TOY_MODEL

# --- Flags that scripts share ---

# A parser, or a group of its arguments under a heading of their own in --help. (argparse has no
# public name for a group.)
ParserOrGroup = argparse.ArgumentParser | argparse._ArgumentGroup


def add_model_arguments(parser: ParserOrGroup) -> None:
    """Add the flags that choose a model and how to run it: --model, --device, --dtype, and --seed
    for all random draws."""
    add = parser.add_argument
    add("--model", type=os.path.expanduser, default=DEFAULT_MODEL,
        help=f"folder, .gguf file, hub id or {TOY_MODEL} (default: %(default)s)")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    add("--device", default=str(accelerator or "cpu"),
        help="cpu, cuda or mps (default here: %(default)s)")
    add("--dtype", choices=DTYPES,
        help="default: bfloat16, but float32 on a CPU that is slow with it, or that trains")
    add("--seed", type=number(int, 0, 2**63 - 1), default=0,
        help="of all random draws (default: %(default)s)")


def add_generation_arguments(parser: ParserOrGroup) -> None:
    """Add the flags that say how to generate an answer, and --json to print the answer as JSON."""
    add = parser.add_argument
    add("--max-new-tokens", type=positive_int, default=256,
        help="the most tokens an answer may have (default: %(default)s)")
    add("--temperature", type=number(float, 0, 100), default=0.0,
        help="0 takes the likeliest token (default: %(default)s)")
    add("--top-p", type=number(float, 1e-6, 1), default=1.0,
        help="draw from the likeliest tokens that make up this share (default: %(default)s)")
    add("--json", action="store_true", help="print one JSON object instead of the text")


# --- Types of values ---


def path(text: str) -> Path:
    """Return the path of a file or folder. `~` is the home folder, even in --out=~/runs, where a
    shell leaves the `~` as it is."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(os.path.expanduser(text))


def address(text: str) -> tuple[str, int]:
    """Return the host and the port of "HOST:PORT" or "PORT". Without a host, the host is this
    machine. An IPv6 address stands in brackets: "[::1]:7000". Raises ArgumentTypeError."""
    match = re.fullmatch(r"(?:(\[.+\]|[^:/\[\]]+):)?([0-9]+)", text)
    if match is None or int(match[2]) > 65535:
        raise argparse.ArgumentTypeError(f"expected PORT or HOST:PORT, not {text!r}")
    host = match[1] or "localhost"
    return host.strip("[]"), int(match[2])


def number(kind: type, low: float, high: float = math.inf) -> Callable[[str], int | float]:
    """Return an argparse type for an int or a float (`kind`) within [low, high]."""
    expected = "a whole number" if kind is int else "a number"
    expected += f", at least {low}" if high == math.inf else f" from {low} to {high}"

    def parse(text: str) -> int | float:
        value = math.nan  # lies within no limits
        with suppress(ValueError):  # a text that is no number
            value = kind(text)
        if not low <= value <= high or value == math.inf:
            raise argparse.ArgumentTypeError(f"expected {expected}, not {text!r}")
        return value

    return parse


def quantity(
    units: dict[str, float], low: float, high: float, expected: str
) -> Callable[[str], float]:
    """Return an argparse type for a number with a unit, whose value lies within [low, high]."""

    def parse(text: str) -> float:
        value = math.nan  # lies within no limits
        match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)([A-Za-z%]+)", text)
        if match:
            value = float(match[1]) * units.get(match[2], math.nan)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"expected {expected}, not {text!r}")
        return value

    return parse


positive_int = number(int, 1)
SECONDS = {"ms": 1e-3, "s": 1.0}
duration = quantity(SECONDS, 0.0, 3600.0, "a duration like 21ms or 0.5s, an hour at most")
time_limit = quantity(SECONDS, 1e-3, 3600.0, "a duration from 1ms to an hour, like 5s")
BITS_PER_SECOND = {"bit": 1.0, "kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9}
bandwidth = quantity(
    BITS_PER_SECOND, 1e3, 1e15, "a bandwidth like 20Mbit or 1Gbit, 1kbit at least"
)
# Of packets: TCP would never finish if every packet were lost.
loss_rate = quantity({"%": 1e-2}, 0.0, 0.9, "a share like 0.1%, 90% at most")

# --- The parser ---


class Parser(argparse.ArgumentParser):
    """A parser that ends the program in one line and with status 2 if the command line is wrong.
    The text of --help ends with examples.
    """

    def __init__(self, *, examples: str = "", **kwargs):
        epilog = f"examples:\n{examples}" if examples else None
        keep_lines = argparse.RawDescriptionHelpFormatter
        super().__init__(
            epilog=epilog, formatter_class=keep_lines, allow_abbrev=False, **kwargs
        )
        # A value like -3ms is taken for a value, which its type refuses, and not for a flag.
        self._negative_number_matcher = re.compile(r"-\.?[0-9]")

    def error(self, message: str) -> NoReturn:
        fail(message.removeprefix("argument "))  # of argparse's "argument --seed: ..."

    def parse_args(self, *args) -> argparse.Namespace:
        namespace, unknown = self.parse_known_args(*args)
        if unknown:
            self.error(f"unexpected argument {unknown[0]!r:.60}: --help lists all flags")
        return namespace

    def refuse(self, args: argparse.Namespace, names: Iterable[str], why: str) -> None:
        """End the program if any of the named arguments differs from its default, because it would
        have no effect. `why` completes the message after the flag: "needs --remote"."""
        for name in names:
            if getattr(args, name) != self.get_default(name):
                flag = name.replace("_", "-")
                self.error(f"--{flag} {why}")
