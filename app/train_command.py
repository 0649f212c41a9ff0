"""The command line of train.py: its flags, and how they become the arguments of `train_drafter`.

A flag that sets a field of `RunConfig` or `DrafterSizes` has the field's name, and but for --dtype
and --seq-len its default.
"""
from __future__ import annotations

import argparse
import json
from dataclasses import asdict, fields
from functools import partial

from app.training import DrafterSizes, RunConfig, train_drafter
from plumbing.devices import choose_training_dtype
from plumbing.errors import run_command
from plumbing.flags import Parser, add_model_arguments, number, path, positive_int
from plumbing.journal import read_log, read_settings
from plumbing.processes import join_processes, leave_processes, rank

EXAMPLES = """\
  python train.py --data ultrachat.jsonl --out runs/drafter
  python train.py --out runs/drafter --resume
  torchrun --nproc-per-node 4 train.py --data ultrachat.jsonl    # on four GPUs (untested)
  python speculate.py --drafter runs/drafter --prompt "Why is the sky blue?"
"""


def main() -> None:
    run_command(run)


def run() -> None:
    args = parse_arguments()
    device = join_processes(args.device)
    args.dtype = choose_training_dtype(device, args.dtype)
    args.run_length = tuple(args.run_length)  # argparse makes a list
    config = RunConfig(**{field.name: getattr(args, field.name) for field in fields(RunConfig)})
    sizes = DrafterSizes(**{size.name: getattr(args, size.name) for size in fields(DrafterSizes)})
    train_drafter(
        args.model, args.data, args.out, config, sizes, device=device, resume=args.resume
    )
    if args.json and rank() == 0:
        log = read_log(args.out)  # empty, if a finished training's log was deleted
        print(json.dumps(log[-1] if log else {}))
    leave_processes()


def parse_arguments() -> argparse.Namespace:
    """Return the command line. With --resume, a flag that is not given has its saved value."""
    parser = make_parser()
    args = parser.parse_args()
    if args.resume:
        saved = read_settings(args.out)
        parser.set_defaults(**{name: saved[name] for name in saved if hasattr(args, name)})
        args = parser.parse_args()  # again, now with the saved values as defaults
    if not args.data:
        none = f": {args.out} holds no training to resume" if args.resume else ""
        parser.error(f"--data FILE is missing{none}")
    shortest, longest = args.run_length
    if shortest > longest:
        parser.error("--run-length LOW HIGH: the shortest comes first")
    if args.dtype == "float16":
        parser.error("--dtype float16 cannot be trained in; try bfloat16")
    return args


def make_parser() -> Parser:
    parser = Parser(
        description="Distill a target into a Mixture-of-Attentions drafter.",
        examples=EXAMPLES,
    )
    add = parser.add_argument
    add("--data", nargs="+", metavar="FILE", type=path,
        help="conversations, as JSON lines or a JSON array")
    add("--out", default="runs/drafter", type=path,
        help="the drafter's folder (default: %(default)s)")
    add("--resume", action="store_true",
        help="go on with the training in --out; flags not given keep their values")
    add("--json", action="store_true", help="end with the log's last record on stdout")
    add_model_arguments(parser)
    add_drafter_arguments(parser)
    add_training_arguments(parser)
    # On a GPU the default dtype is bfloat16, see `choose_training_dtype`.
    # The default --seq-len depends on the target, see `train_drafter`.
    later = {"dtype": None, "seq_len": None}
    parser.set_defaults(**asdict(RunConfig()) | asdict(DrafterSizes()) | later)
    return parser


def add_drafter_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("the drafter (sizes default to the paper's proportions)")
    count = partial(group.add_argument, type=positive_int)
    group.add_argument("--tli", type=number(int, 0), metavar="N",
                       help="target layers to reuse (default: %(default)s)")
    count("--lsa-heads", help="heads of LSA")
    count("--lsa-mlp", help="width of LSA's MLP")
    count("--mlp", help="width of SA's and CA's MLPs")
    count("--kv-heads", help="kv heads of SA and CA")
    count("--draft-vocabulary", metavar="COUNT", help="draft only the most frequent tokens")


def add_training_arguments(parser: Parser) -> None:
    add = parser.add_argument_group("training").add_argument
    count = partial(add, type=positive_int)
    factor = partial(add, type=number(float, 0))
    count("--updates", help="default: one pass over the data")
    count("--batch-size", help="conversations in an update (default: %(default)s)")
    count("--micro-batch-size", help="conversations read at once (default: %(default)s)")
    add("--seq-len", type=number(int, 16),
        help=f"tokens of a conversation, at most (default: {RunConfig.seq_len}, or the target's "
        "context if that is less)")
    factor("--lr", metavar="RATE",
           help="learning rate; --schedule paper peaks at 20 times this (default: %(default)s)")
    add("--schedule", choices=("paper", "cosine"),
        help="the learning rate's; paper: as in its authors' code (default: %(default)s)")
    count("--warmup", metavar="UPDATES",
          help="in which the learning rate rises (default: %(default)s)")
    add("--optimizer", choices=("adamw", "muon"),
        help="muon: for matrices, with adamw for the rest (default: %(default)s)")
    factor("--kl-weight", help="the weight of KL(p || q) (default: %(default)s)")
    factor("--feature-weight",
           help="the weight of Smooth L1 on hidden states (default: %(default)s)")
    count("--run-length", nargs=2, metavar=("LOW", "HIGH"),
          help="tokens of a mock cycle (default: {} {})".format(*RunConfig.run_length))
    count("--eval-every", metavar="UPDATES",
          help="updates between evaluations on held-out text (default: %(default)s)")
    count("--save-every", metavar="UPDATES",
          help="updates between checkpoints (default: %(default)s)")
