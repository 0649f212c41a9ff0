"""Evaluate a finished drafter on conversations.

By default in one pass over each text, as while training: its losses, and how often the token that
it would draft at each depth is the target's first choice. Both sides read the text as it stands, so
this scores drafts that follow the text. `evaluate` of app/evaluation.py does it.

With --by-drafting it really drafts: a chain of eight tokens from every eighth position of an
answer, which the target verifies. This takes longer, and is what happens in use.

    python -m experiments.evaluate runs/drafter --data held_out.jsonl
    python -m experiments.evaluate runs/drafter --data held_out.jsonl --by-drafting
"""
from __future__ import annotations

import itertools
import json
from argparse import Namespace

import torch
from tqdm import tqdm

from app.evaluation import EVALUATION_CYCLE, check_context, depth_scores, evaluate
from app.exact import ExactVerifier
from app.loading import load_drafter, load_target, make_ready
from app.training import RunConfig
from llama import Sampling
from moa import Drafter, DraftLimits, DraftState
from plumbing.conversations import Conversations, TokenizedConversation, check_files
from plumbing.devices import DTYPES, choose_training_dtype
from plumbing.errors import InputError, run_command
from plumbing.flags import Parser, add_model_arguments, number, path
from train import loss_mask


@torch.no_grad()
def evaluate_drafting(drafter: Drafter, sequences: list[TokenizedConversation]) -> dict:
    """Return `depth_scores` of chains that are drafted from every eighth trained position.

    The target verifies each chain, and then the text goes on as it stands. Raises InputError.
    """
    cycles = []
    for sequence in tqdm(sequences, desc="drafting", leave=False):
        tokens = sequence.tokens.tolist()
        verifier = ExactVerifier(drafter.target, drafter, len(tokens), Sampling())
        state = DraftState(drafter, len(tokens), Sampling())
        trained = loss_mask(sequence.answer)[:-EVALUATION_CYCLE]  # a chain must fit after each
        starts = trained.nonzero().flatten().tolist()[::EVALUATION_CYCLE]
        for read, start in itertools.pairwise([0, *starts]):
            state.append_verified(verifier.prefill(tokens[read:start]).update)
            draft = state.draft(tokens[start], DraftLimits(depth=EVALUATION_CYCLE))
            accepted = verifier.verify(draft).accepted
            cycles.append([True] * len(accepted) + [False])  # (there is no ninth depth)
            verifier.cache.length = start  # drop root and draft: the text may go on otherwise
    if not cycles:
        raise InputError("--by-drafting: no answer is long enough to draft in")
    return depth_scores(cycles)


# --- Command line ---


def parse_arguments() -> Namespace:
    parser = Parser(
        usage="python -m experiments.evaluate DIR --data FILE ... [flags]",
        description="Score a drafter on conversations. Prints one JSON object.",
        examples="python -m experiments.evaluate runs/drafter --data held_out.jsonl",
    )
    add = parser.add_argument
    add("drafter", type=path, metavar="DIR", help="the drafter's folder")
    add("--data", nargs="+", required=True, type=path, metavar="FILE",
        help="conversations, as JSON lines or a JSON array")
    add("--by-drafting", action="store_true",
        help="really draft, instead of one pass over the text")
    add("--seq-len", type=number(int, 16),
        help=f"tokens of a conversation, at most (default: {RunConfig.seq_len}, or the target's "
        "context if that is less)")
    add_model_arguments(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    check_files(args.data)  # before the model is loaded, which takes longer
    dtype = choose_training_dtype(args.device, args.dtype)
    target, tokenizer = load_target(args.model, args.device, DTYPES[dtype])
    if args.seq_len is None:
        args.seq_len = min(RunConfig.seq_len, target.config.max_position_embeddings)
    check_context(args.seq_len, target)
    drafter = load_drafter(args.drafter, target)
    data = Conversations(args.data, tokenizer, args.seq_len)
    sequences = [data[index] for index in range(len(data))]
    if args.by_drafting:
        make_ready(target, [drafter])
        scores = evaluate_drafting(drafter, sequences)
    else:
        config = RunConfig(dtype=dtype, seq_len=args.seq_len)
        scores = evaluate(drafter, sequences, config, dtype)
    print(json.dumps(scores))


if __name__ == "__main__":
    run_command(main)
