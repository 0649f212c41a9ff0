"""The command line of llama.py: what speculate.py does with --no-speculation, the target alone."""
from __future__ import annotations

from app.speculate_command import answer, make_parser
from plumbing.errors import run_command
from plumbing.flags import Parser, add_generation_arguments, add_model_arguments


def main() -> None:
    run_command(run)


def run() -> None:
    parser = Parser(
        description="Generate with the target alone.",
        examples='  python llama.py --prompt "Why is the sky blue?"\n'
        "  echo Hi | python llama.py --model toy --temperature 0.7",
    )
    parser.add_argument("--prompt", help="default: standard input or, on a terminal, a chat")
    add_model_arguments(parser.add_argument_group("model"))
    add_generation_arguments(parser.add_argument_group("answer"))
    # What this command has no flag for is as speculate.py would have it.
    answer(parser.parse_args(None, make_parser().parse_args(["--no-speculation"])))
