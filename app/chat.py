"""The terminal: one prompt, or a chat.

Ctrl-C during an answer is handled in `Terminal.respond`: it ends the answer, whose cost is then
printed.
"""
from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import dataclass, replace

from app.answers import Generation, Method
from app.display import Display, Printer, Trace
from app.loading import Models
from llama import GenerationConfig
from plumbing.errors import InputError
from plumbing.prompts import answer_length
from plumbing.terminal import draw_statistics, read_questions, waiting_line, why_stopped


@dataclass
class Terminal:
    """Answers the prompts of one command line."""

    models: Models
    method: Method
    config: GenerationConfig
    show: bool = False  # print tokens in colors
    trace: bool = False
    as_json: bool = False

    def chat(self, greeting: str) -> None:
        """Answer one question after the other, with the conversation so far as context. Each answer
        has new caches, so the target reads the conversation again.

        Two kinds of turns are left out of the conversation: the oldest ones, when the context is
        full, and a question whose answer was cut short, by Ctrl-C or because the server is lost:
        later answers would take it for a complete one.
        """
        usage = "Ask something. Ctrl-C ends an answer; exit, quit or Ctrl-D ends the chat."
        print(f"{greeting}\n{usage}", file=sys.stderr)
        context = self.models.target.config.max_position_embeddings
        room = min(self.config.max_new_tokens, context // 2)  # tokens left free for an answer
        messages: list[dict] = []
        for question in read_questions():
            asked = [*messages, {"role": "user", "content": question}]
            while len(asked) > 1 and len(self.models.tokenizer.chat(asked)) > context - room:
                asked = asked[2:]  # without the oldest question and its answer
            try:
                text = self.respond(asked)
            except InputError as error:  # too long, or the server is gone: the chat goes on
                print(f"\nerror: {error}", file=sys.stderr)
                text = None
            if text is None:
                print("this question is left out of the conversation", file=sys.stderr)
                continue
            if len(asked) <= len(messages):
                print("the context is full: the oldest questions are left out", file=sys.stderr)
            messages = [*asked, {"role": "assistant", "content": text}]

    def respond(self, messages: list[dict]) -> str | None:
        """Print the answer to a conversation, and what it cost. Return the answer, or None if
        Ctrl-C ended it. Raises InputError if the server is lost, after what arrived is printed."""
        tokenizer = self.models.tokenizer
        prompt = tokenizer.chat(messages)
        context = self.models.target.config.max_position_embeddings
        count = answer_length(context, len(prompt), self.config.max_new_tokens)
        config = replace(self.config, max_new_tokens=count)
        if self.trace and self.as_json:
            print(json.dumps({"prompt": messages[-1]["content"], "tokens": prompt}))
        display = self.new_display()
        generation = Generation(prompt)
        stopped = None
        failure = None
        try:
            with closing(generation.record(self.method.cycles(prompt, config))) as cycles:
                with waiting_line(f"reading the prompt, {len(prompt)} tokens ..."):
                    first = next(cycles)
                display.emit(first)
                for cycle in cycles:
                    display.emit(cycle)
        except KeyboardInterrupt:
            stopped = "interrupted"
        except InputError as error:
            stopped = "server lost"
            failure = error
        text = tokenizer.decode(generation.tokens)
        if generation.tokens:  # else it ended before the first token
            display.end(text)
            self.report(text, generation, stopped)
        if failure:
            raise failure
        return None if stopped else text

    def new_display(self) -> Display:
        tokenizer = self.models.tokenizer
        if self.trace:
            return Trace(tokenizer, self.config.new_sampling("cpu"), self.as_json)
        return Display() if self.as_json else Printer(tokenizer, self.show)

    def report(self, text: str, generation: Generation, stopped: str | None) -> None:
        """Print what an answer cost, and whether the network was down. stopped: what cut it short,
        or None."""
        config = self.config
        target = self.models.target
        if stopped is None:
            stopped = why_stopped(generation.tokens, config.stop_ids, config.max_new_tokens)
        statistics = {
            **generation.statistics(),
            "stopped": stopped,
            "seed": config.seed,
            "device": str(target.device),
            "dtype": str(target.dtype).removeprefix("torch."),
        }
        if self.as_json:
            print(json.dumps({"text": text, "tokens": generation.tokens, **statistics}))
        else:
            print(draw_statistics(statistics), file=sys.stderr)
        if generation.outage:
            print(
                f"the server stopped answering ({generation.outage}): {generation.unverified} of "
                f"{len(generation.tokens)} tokens are the drafter's own, unverified",
                file=sys.stderr,
            )
