"""The command line of llama.py: the target alone answers one prompt."""
from __future__ import annotations

from app.answers import Alone
from app.chat import Terminal, generation_config
from app.loading import load_target_alone
from plumbing.devices import DTYPES, choose_dtype
from plumbing.errors import run_command
from plumbing.flags import Parser, add_generation_arguments, add_model_arguments
from plumbing.prompts import given_or_piped


def main() -> None:
    run_command(run)


def run() -> None:
    parser = Parser(
        description="Generate with the target alone.",
        examples='  python llama.py --prompt "Why is the sky blue?"\n'
        "  echo Hi | python llama.py --model toy --temperature 0.7",
        main_flag="--prompt",
    )
    parser.add_argument("--prompt", help="default: what is piped into standard input")
    add_model_arguments(parser.add_argument_group("model"))
    add_generation_arguments(parser.add_argument_group("answer"))
    args = parser.parse_args()
    question = given_or_piped(args.prompt)
    dtype = DTYPES[choose_dtype(args.device, args.dtype)]
    models = load_target_alone(args.model, args.device, dtype)
    config = generation_config(args, models.tokenizer)
    Terminal(models, Alone(models.target), config, as_json=args.json).answer_once(question)
