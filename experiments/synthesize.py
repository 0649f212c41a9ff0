"""Synthesis: the target writes its own training data (the idea of Magpie, Xu et al. 2024).

A drafter learns best from text that the target itself would write. So the target talks to itself:
it writes a question, as if it were the user, then the answer, and sometimes goes on. Or it answers
the questions of a file, each once. Conversations are written when they end, one JSON object a line:

    {"synthetic": true, "messages": [{"role": "user", "content": "..."}, ...]}

    python -m experiments.synthesize 1000 --out own.jsonl
    python -m experiments.synthesize 1000 --out own.jsonl --questions ultrachat.jsonl

After an interruption the same command goes on: it counts what is there, and writes the rest.

Many conversations are written at once, in a batch (see experiments/batching.py). Its `Request` is
one turn of a conversation, and the request's `key` is the conversation, a list of messages. Every
turn reads the text so far again.
"""
from __future__ import annotations

import itertools
import json
import random
import signal
import sys
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Iterator

import torch
from tqdm import tqdm

from app.loading import load_target_alone
from experiments.batching import Batch, Request
from experiments.prompts import read_first_questions
from llama import GenerationConfig, Llama
from plumbing.chat import MARK
from plumbing.devices import DTYPES, choose_dtype
from plumbing.errors import InputError, run_command
from plumbing.flags import Parser, add_model_arguments, number, path, positive_int
from plumbing.processes import say
from plumbing.records import next_role
from plumbing.tokenizer import Tokenizer

TEMPERATURES = {  # of a turn, drawn from these
    "user": (1.0,),
    "assistant": (0.0, 0.0, 0.6, 1.0),  # half of them greedy, as drafters are mostly used
}
TOP_P = 0.95
NEXT_TURN = 0.3  # the probability that a conversation goes on after an answer
MIN_ROOM = 32  # tokens that must be left for a turn
MAX_BARREN = 500  # conversations in a row without an answer, after which synthesis gives up


@dataclass(frozen=True)
class SynthesisConfig:
    batch_size: int = 32  # conversations written at once
    seq_len: int = 2048  # tokens of a conversation, at most
    seed: int = 0


# --- Conversations of the target with itself ---


@torch.inference_mode()
def converse(
    target: Llama,
    tokenizer: Tokenizer,
    questions: list[str] | None,
    wanted: int,
    config: SynthesisConfig,
) -> Iterator[list[dict]]:
    """Let the target write up to `wanted` conversations. Yields each when it ends; the last message
    may be cut short.

    questions: what the conversations begin with, one each. None: the target asks, too.
    Raises InputError if the target only asks, and does not come to an answer.
    """
    # A conversation is in one of three places: `openings` (not begun), `waiting` (between two
    # turns), or a row of the batch (a turn is being written). When it ends it is yielded or, if it
    # has no answer, dropped.
    openings = open_conversations(questions)
    waiting = []
    batch = Batch(target, config.batch_size, config.seq_len)
    draws = random.Random(config.seed)
    barren = 0  # how many in a row had no answer
    while True:
        # 1. Begin as many conversations as fit in the batch, and as are still wanted.
        under_way = len(batch.requests) + len(waiting)
        waiting += itertools.islice(openings, min(wanted, config.batch_size) - under_way)
        # 2. Begin the next turn of each that waits. On a GPU, where one pass reads all their
        # prompts, wait until there are some: until an eighth of the rows is free.
        free = config.batch_size - len(batch.requests)
        if free >= config.batch_size / 8 or target.device.type == "cpu":
            turns = [next_turn(tokenizer, messages, draws, config) for messages in waiting]
            batch.add_all(turns)
            waiting = []
        if not batch.requests:
            return
        # 3. Run one pass. Where it ends a turn, the conversation goes on, or ends.
        for request in batch.step():
            messages = request.key
            if append_turn(tokenizer, request, draws):
                waiting.append(messages)
            elif len(messages) >= 2:  # it has an answer
                barren = 0
                wanted -= 1
                yield messages
            else:
                barren += 1
                if barren == MAX_BARREN and questions is None:  # (questions come to an end)
                    raise InputError(
                        f"{barren} conversations in a row had no answer: raise --seq-len above "
                        f"{config.seq_len}, or the target does not end its turns"
                    )


def open_conversations(questions: list[str] | None) -> Iterator[list[dict]]:
    """Yield the messages that conversations begin with: a question or, without end, none."""
    if questions is None:
        while True:
            yield []
    for question in questions:
        yield [{"role": "user", "content": question}]


def next_turn(
    tokenizer: Tokenizer, messages: list[dict], draws: random.Random, config: SynthesisConfig
) -> tuple[list[dict], list[int], GenerationConfig]:
    """Return the next turn of a conversation, as `Batch.add_all` takes what is to be written."""
    role = next_role(messages)
    ids = tokenizer.chat(messages) if role == "assistant" else question_prompt(tokenizer, messages)
    prompt = ids[:config.seq_len - 1]  # there is room for one token, at least
    room = config.seq_len - len(prompt)
    temperature = draws.choice(TEMPERATURES[role])
    seed = draws.getrandbits(63)
    stop_ids = frozenset(tokenizer.stop_ids)
    return messages, prompt, GenerationConfig(room, temperature, TOP_P, seed, stop_ids)


def question_prompt(tokenizer: Tokenizer, messages: list[dict]) -> list[int]:
    """Return the ids of a conversation up to where the user's next message begins. Raises
    InputError."""
    template = tokenizer.chat_template
    markup = template.render([*template.protect(messages), {"role": "user", "content": MARK}])
    before, _, _ = markup.rpartition(MARK)
    return tokenizer.encode_markup(before)


def append_turn(tokenizer: Tokenizer, request: Request, draws: random.Random) -> bool:
    """Append a turn to its conversation, if it is of use: an answer may be cut short, a question
    may not. Returns whether another turn follows."""
    messages = request.key
    role = next_role(messages)
    text = tokenizer.decode(request.tokens).strip()
    is_full = request.config.max_new_tokens == 1  # `next_turn` may have cut the prompt
    if not text or is_full:
        return False
    has_ended = request.tokens[-1] in tokenizer.stop_ids
    may_go_on = has_ended and request.left >= MIN_ROOM
    if role == "user" and not may_go_on:  # cut short, or no room for its answer
        return False
    messages.append({"role": role, "content": text})
    if role == "user":
        return True
    return may_go_on and draws.random() < NEXT_TURN


# --- The file, which an earlier run may have begun ---

LINE_BEGINS = b'{"synthetic": true, "messages": '  # in no other file


def synthesize(
    target: Llama,
    tokenizer: Tokenizer,
    questions: list[str] | None,
    count: int,
    out: Path,
    config: SynthesisConfig,
) -> int:
    """Write conversations to a file, each when it ends, until it has `count` or all questions are
    answered. Returns how many it has then. Raises InputError."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out, "ab+") as file:
        file.seek(0)
        content = file.read()
        # The file must begin as ours do. (This way round, because an empty file, or one whose first
        # line was cut short, is ours too.)
        if not LINE_BEGINS.startswith(content[:len(LINE_BEGINS)]):
            raise InputError(f"{out}: was not written by this program; choose another --out")
        # An earlier run may have been killed while it wrote its last line: cut that off.
        file.truncate(content.rfind(b"\n") + 1)
        written = content.count(b"\n")
        if questions is not None:
            answered = set(read_first_questions(out))
            asked = dict.fromkeys(questions)  # each once
            questions = [question for question in asked if question not in answered]
        # The seed depends on what is there already, or the same conversations would come again.
        # (Shifted, so that it differs from any seed that a user is likely to give.)
        config = replace(config, seed=config.seed + (written << 32))
        conversations = converse(target, tokenizer, questions, max(0, count - written), config)
        try:
            for messages in tqdm(conversations, "writing", count, initial=written):
                line = json.dumps(messages, ensure_ascii=False).encode()
                file.write(LINE_BEGINS + line + b"}\n")
                file.flush()
        finally:  # also where Ctrl-C or SIGTERM ends it, between any two statements
            file.seek(0)
            written = file.read().count(b"\n")
            more = "a larger COUNT" if written >= count else "the same command"
            say(f"{written} of {count} conversations are in {out}: {more} goes on")
    return written


# --- Command line ---

EXAMPLES = """\
python -m experiments.synthesize 1000 --out own.jsonl
python -m experiments.synthesize 1000 --out own.jsonl --questions ultrachat.jsonl
"""


def parse_arguments() -> Namespace:
    parser = Parser(
        usage="python -m experiments.synthesize COUNT --out FILE [flags]",
        description="Let a target write conversations, to train its drafter on.",
        examples=EXAMPLES,
    )
    add = parser.add_argument
    add("count", type=positive_int, metavar="COUNT", help="conversations that the file is to have")
    add("--out", type=path, required=True, metavar="FILE",
        help="written line by line; what is there already counts")
    add("--questions", type=path, metavar="FILE",
        help="conversations: their first questions are answered, each once")
    add("--batch-size", type=positive_int, default=SynthesisConfig.batch_size,
        help="conversations written at once (default: %(default)s)")
    add("--seq-len", type=number(int, 16),
        help=f"tokens of a conversation, at most (default: {SynthesisConfig.seq_len}, or the "
        "target's context if that is less)")
    add("--json", action="store_true", help="end with one JSON object on stdout")
    add_model_arguments(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    # Ends at once: what is written is in the file already.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    questions = None
    if args.questions is not None:
        questions = list(read_first_questions(args.questions))
        if not questions:
            raise InputError(f"{args.questions}: no conversation with a question")
    dtype = DTYPES[choose_dtype(args.device, args.dtype)]
    target, tokenizer, _ = load_target_alone(args.model, args.device, dtype)
    context = target.config.max_position_embeddings
    if args.seq_len is None:
        args.seq_len = min(SynthesisConfig.seq_len, context)
    if args.seq_len > context:
        raise InputError(f"--seq-len {args.seq_len}: the target's context is {context}")
    config = SynthesisConfig(args.batch_size, args.seq_len, args.seed)
    written = synthesize(target, tokenizer, questions, args.count, args.out, config)
    if written < args.count:
        missing = "there are no more questions, or they had no answer"
        if not written:
            raise InputError(f"{missing}: run again, or raise --seq-len")
        say(missing)
    if args.json:
        print(json.dumps({"conversations": written}))


if __name__ == "__main__":
    run_command(main)
