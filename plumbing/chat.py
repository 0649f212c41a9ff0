r"""Chat templates: how a conversation is written as one text, for the model that will read it.

A checkpoint states this in its chat template, a program in the language Jinja. In the format
ChatML, a question and the opening of its answer are

    <|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n

The template is rendered as `transformers` does, by jinja2, which PyTorch requires and so installs.
A stranger wrote it: it runs in a sandbox, where it can reach no attribute of Python's own objects
and change nothing that it is given.

What a template writes is *markup*: text whose control tokens, such as <|im_end|>, mark who speaks
and where a turn ends. (A turn is what one speaker says at once.) What users write is never markup.
If a message holds the characters of a control token, `protect` puts a MARK between them, so that
the control tokens of the markup are those that the template wrote. `Tokenizer` of
plumbing/tokenizer.py, which is the only one to use this module, removes the marks again.
"""
from __future__ import annotations

import json
import re
from datetime import datetime
from functools import cached_property, partial
from typing import Iterable, Iterator, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from plumbing.errors import InputError, input_errors
from plumbing.records import check_message

MARK = "\udc80"  # half of a surrogate pair: no valid text contains it


def raise_exception(message: str) -> NoReturn:
    """Templates call this where they refuse a conversation."""
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    """Templates call this for today's date."""
    return datetime.now().strftime(form)


class ChatTemplate:
    """A chat template, compiled. All methods raise InputError where the template fails.

    source: the template.
    names: what the template calls special tokens, such as {"bos_token": "<s>"}.
    control_tokens: those of the tokenizer.
    """

    def __init__(self, source: str, names: dict[str, str], control_tokens: Iterable[str]):
        # Some templates mark what the model writes, as {% generation %} ... {% endgeneration %},
        # which changes nothing in the text.
        source = re.sub(r"(\{%-?\s*)generation\b", r"\1if true", source)
        source = re.sub(r"(\{%-?\s*)endgeneration\b", r"\1endif", source)
        sandbox = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        sandbox.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        sandbox.globals.update(names, raise_exception=raise_exception, strftime_now=strftime_now)
        with input_errors("the model's chat template is invalid", jinja2.TemplateError):
            self.template = sandbox.from_string(source)
        longest_first = sorted(control_tokens, key=len, reverse=True)  # of two that begin alike
        # A pattern. Without any control token it matches nowhere.
        self.control_pattern = "|".join(map(re.escape, longest_first)) or "(?!)"

    def render(self, messages: list[dict], add_generation_prompt: bool = False) -> str:
        """Return the markup of a conversation. The generation prompt opens the assistant's next
        turn."""
        with input_errors("the model's chat template fails", Exception):  # it may raise anything
            return self.template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
            )

    def protect(self, messages: list[dict]) -> list[dict]:
        """Return messages with marks within their control tokens. Raises InputError if these are no
        messages of a chat.

        A template may look for a control token in a message: some drop all of an answer up to
        </think>. Where marks would change what the template writes, there are none.
        """
        protected = []
        for message in messages:
            check_message(message)
            protected.append({"role": message["role"], "content": message["content"]})
        expected = self.render(protected)
        for message in protected:
            for token in sorted(set(re.findall(self.control_pattern, message["content"]))):
                unmarked = message["content"]
                message["content"] = unmarked.replace(token, MARK.join(token))
                if self.render(protected).replace(MARK, "") != expected:
                    message["content"] = unmarked
        return protected

    @cached_property
    def end_of_answer(self) -> str:
        """The control token with which the template ends an answer. Raises InputError if there is
        none."""
        exchange = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": MARK}]
        _, _, ending = self.render(exchange).rpartition(MARK)
        token = re.search(self.control_pattern, ending)
        if token is None:
            raise InputError("the model's chat template ends an answer with no control token")
        return token[0]

    def turns(self, messages: list[dict]) -> Iterator[tuple[str, bool]]:
        r"""Yield the markup of a conversation to train on in pieces, each with whether the
        assistant generates it. One exchange in ChatML has three pieces:

            <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n     False
            Hello!<|im_end|>                                            True
            \n                                                          False

        Raises InputError if an answer does not follow the very text that the model is given to
        answer, or is written differently once the conversation goes on: a drafter would be trained
        on what it never sees.
        """
        messages = self.protect(messages)
        markup = self.render(messages)
        begin = 0
        for i, message in enumerate(messages):
            if message["role"] == "assistant" and i > 0:  # what begins it answers nothing
                opening = self.render(messages[:i], add_generation_prompt=True)
                answered = self.render(messages[:i + 1])
                answer, token, _ = answered[len(opening):].partition(self.end_of_answer)
                written = opening + answer + token
                is_whole = message["content"].strip() in answer and token
                if not is_whole or not markup.startswith(written):
                    raise InputError("the model's chat template rewrites turns or drops a part")
                yield markup[begin:len(opening)], False
                yield answer + token, True
                begin = len(written)
        yield markup[begin:], False
