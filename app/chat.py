"""The terminal: one prompt, or a chat.

Ctrl-C is handled here, in `Terminal.respond`, and nowhere else: it ends an answer, of which
everything that was written is printed, with its cost.
"""
from __future__ import annotations

import json
import sys
from argparse import Namespace
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Iterator

from app.answers import (
    Generation,
    Method,
    acceptance_length,
    after_each_pass,
    tokens_per_second,
)
from app.display import Display, Printer, Silent, Trace
from app.loading import Models
from llama import PIECE, GenerationConfig
from plumbing.errors import InputError
from plumbing.prompts import answer_length, drop_oldest_exchanges
from plumbing.terminal import (
    draw_statistics,
    prompt_bar,
    read_questions,
    waiting_note,
    why_stopped,
)
from plumbing.tokenizer import TextStream, Tokenizer


def generation_config(args: Namespace, tokenizer: Tokenizer) -> GenerationConfig:
    """Return what the flags of `add_generation_arguments` and --seed state."""
    stop_ids = frozenset(tokenizer.stop_ids)
    return GenerationConfig(
        args.max_new_tokens, args.temperature, args.top_p, args.seed, stop_ids
    )


@dataclass
class Terminal:
    """Answers the prompts of one command line."""

    models: Models
    method: Method
    config: GenerationConfig
    remote: bool = False  # the target is on a server
    show: bool = False  # print tokens in colors
    trace: bool = False
    as_json: bool = False
    answers: list[Generation] = field(default_factory=list)

    def answer_once(self, question: str) -> None:
        """Answer a single prompt. If Ctrl-C ends the answer, exit with status 130."""
        if not self.respond([{"role": "user", "content": question}]):
            sys.exit(130)  # the shell's number for Ctrl-C

    def respond(self, messages: list[dict]) -> bool:
        """Print the answer to a conversation, and what it cost. Return whether it is complete: not
        if Ctrl-C ended it."""
        prompt = self.models.tokenizer.chat(messages)
        context = self.models.target.config.max_position_embeddings
        count = answer_length(context, len(prompt), self.config.max_new_tokens)
        config = replace(self.config, max_new_tokens=count)
        if self.trace and self.as_json:
            print(json.dumps({"prompt": messages[-1]["content"], "tokens": prompt}))
        display = self.new_display()
        generation = Generation(prompt)
        stopped = None
        try:
            with closing(generation.record(self.method.cycles(prompt, config))) as cycles:
                with self.progress(prompt):
                    first = next(cycles)
                for cycle in chain([first], cycles):
                    display.emit(cycle)
        except KeyboardInterrupt:
            stopped = "interrupted"
        if generation.tokens:  # else Ctrl-C came before the first token
            text = self.models.tokenizer.decode(generation.tokens)
            display.end(text)
            self.report(text, generation, stopped)
            self.answers.append(generation)
        return stopped is None

    def new_display(self) -> Display:
        tokenizer = self.models.tokenizer
        if self.trace:
            return Trace(tokenizer, self.config.new_sampling("cpu"), self.as_json)
        return Silent() if self.as_json else Printer(TextStream(tokenizer), self.show)

    @contextmanager
    def progress(self, prompt: list[int]) -> Iterator[None]:
        """Show that the program is at work while a prompt is read, within this block."""
        if self.remote:
            with waiting_note():
                yield
            return
        with prompt_bar(len(prompt)) as bar:
            with after_each_pass(self.models.target, lambda: bar.update(PIECE)):
                yield

    def report(self, text: str, generation: Generation, stopped: str | None) -> None:
        """Print what an answer cost, and whether the network was down. stopped: why the answer was
        ended; None: it ended by itself."""
        config = self.config
        if stopped is None:
            stopped = why_stopped(generation.tokens, config.stop_ids, config.max_new_tokens)
        statistics = {**generation.statistics(), "stopped": stopped, "seed": config.seed}
        if self.as_json:
            print(json.dumps({"text": text, "tokens": generation.tokens, **statistics}))
        else:
            print(draw_statistics(statistics), file=sys.stderr)
        if generation.outage:
            print(
                f"the server was lost ({generation.outage}): {generation.unverified} of "
                f"{len(generation.tokens)} tokens are the drafter's own, unverified",
                file=sys.stderr,
            )
        elif generation.disconnected:
            print("the network was down for a while; all tokens are the target's", file=sys.stderr)

    def chat(self, greeting: str) -> None:
        """Answer one question after the other, with the conversation so far as context."""
        messages: list[dict] = []
        usage = "Ask something. Ctrl-C ends an answer; exit, quit or Ctrl-D ends the chat."
        print(f"{greeting}\n{usage}", file=sys.stderr)
        for question in read_questions():
            try:
                messages = self.take_turn(messages, question)
            except InputError as error:  # too long, or the server is gone: the chat goes on
                print(f"\nerror: {error}", file=sys.stderr)
        if self.answers:
            tokens = sum(len(g.tokens) for g in self.answers)
            answers = "1 answer" if len(self.answers) == 1 else f"{len(self.answers)} answers"
            print(
                f"{answers}, {tokens} tokens, {tokens_per_second(self.answers):.3g} tokens "
                f"per second, acceptance length {acceptance_length(self.answers):.3g}",
                file=sys.stderr,
            )

    def take_turn(self, messages: list[dict], question: str) -> list[dict]:
        """Answer a question. Return the conversation with question and answer, but without turns
        that the context has no room for. An answer that Ctrl-C cut short is left out with its
        question: later answers would take it for a complete one."""
        tokenizer = self.models.tokenizer
        context = self.models.target.config.max_position_embeddings
        room = min(self.config.max_new_tokens, context // 2)  # tokens left free for an answer
        asked = drop_oldest_exchanges(
            [*messages, {"role": "user", "content": question}],
            lambda kept: len(tokenizer.chat(kept)),
            context,
            room,
        )
        if not self.respond(asked):
            print("this question is left out of the conversation", file=sys.stderr)
            return messages
        text = tokenizer.decode(self.answers[-1].tokens)
        return [*asked, {"role": "assistant", "content": text}]
