r"""Chat formats: the two that are known, and which one a model has learned.

In ChatML a question, and the opening of its answer, are:

    <|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n

A model's chat template states its format, as a program in a language of its own, Jinja. It is not
run here. Four things are read off it, as text: the turns that it writes, whether it drops the
spaces around a message, the token that it begins with, and a system message of its own. A template
that writes other turns is refused.
"""
from __future__ import annotations

import re
from dataclasses import dataclass, replace

import tokenizers

from plumbing.errors import InputError

CONTROL_TOKENS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
CONTROL_PATTERN = re.compile(r"(<\|\w+\|>)")


@dataclass(frozen=True)
class ChatFormat:
    """How a conversation is written. The texts contain control tokens."""

    name: str
    begin: str  # the token before everything, or ""
    open_turn: str  # with {role} in it
    end_turn: str
    strips: bool  # whether spaces around a message are dropped
    system: str = ""  # the system message of a conversation that brings none


CHATML = ChatFormat("ChatML", "", "<|im_start|>{role}\n", "<|im_end|>\n", strips=False)
LLAMA3 = ChatFormat(
    "Llama-3",
    "<|begin_of_text|>",
    "<|start_header_id|>{role}<|end_header_id|>\n\n",
    "<|eot_id|>",
    strips=True,
)


# --- Which one a model has learned ---

SUPPORTED_FORMATS = "only ChatML and Llama-3 are supported"


def detect_chat_format(
    backend: tokenizers.Tokenizer, template: str, bos_token: str
) -> ChatFormat:
    """Return a model's chat format: what its template writes or, if that is "", what its control
    tokens suggest. Raises InputError if conversations cannot be written for it."""
    if template:
        chosen = recognise_template(template, bos_token)
    elif backend.token_to_id("<|im_start|>") is not None:
        chosen = CHATML
    else:
        chosen = LLAMA3
    needed = CONTROL_PATTERN.findall(chosen.open_turn + chosen.end_turn)
    if chosen.begin:
        needed.append(chosen.begin)
    for token in needed:
        if backend.token_to_id(token) is None:
            raise InputError(
                f"the tokenizer has no token {token} of a chat format: {SUPPORTED_FORMATS}"
            )
    if marks_beginnings(backend):
        raise InputError(
            "the tokenizer marks where a text begins, as SentencePiece does, and so cannot encode "
            "a conversation in pieces: use a model with a byte-level tokenizer"
        )
    return chosen


def marks_beginnings(backend: tokenizers.Tokenizer) -> bool:
    """Tell whether a text gets a mark or a space before its first word."""
    text = "a"
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    if backend.pre_tokenizer is not None:
        text = "".join(piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text))
    return text != "a"


def recognise_template(template: str, bos_token: str) -> ChatFormat:
    """Return the format that a chat template writes. Raises InputError if it is no known one."""
    text = written_text(template)
    for known in (CHATML, LLAMA3):
        contents = turn_contents(text, known)
        # If there are both, it drops the spaces for some roles only, which is not supported.
        if len(contents) == 1:
            return replace(
                known,
                begin=beginning(template, bos_token, known),
                strips=contents == {"{stripped}"},
                system=own_system_message(template, known),
            )
    raise InputError(f"the model's chat template is of another format: {SUPPORTED_FORMATS}")


def written_text(template: str) -> str:
    r"""Return a chat template without Jinja's quotes and plus signs. Where it inserts a message's
    role or content, {role} or {content} stands, or {stripped} for content without the spaces
    around it.

    For example, '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>'
    becomes <|im_start|>{role}\n{stripped}<|im_end|>.
    """
    text = template.replace("\\n", "\n")
    for name in ("role", "content"):  # message['role'] or message.role -> {role}
        text = re.sub(rf"\w+(\.{name}\b|\[['\"]{name}['\"]\])", f"{{{name}}}", text)
    # {content} | trim or {content}.strip() -> {stripped}
    text = re.sub(r"\{content\}(\s*\|\s*trim\b|\.strip\(\))", "{stripped}", text)
    return re.sub(r"['\"]|\s*\+\s*", "", text)  # 'a' + 'b' -> ab


def turn_contents(text: str, known: ChatFormat) -> set[str]:
    """Return what stands for the message in a format's turns: {content}, {stripped} or both. It is
    nothing if `text`, the `written_text` of a template, has no such turn."""
    contents = set()
    for role in ("{role}", "user", "assistant"):  # a turn for all roles, or one for each
        for content in ("{content}", "{stripped}"):
            turn = known.open_turn + content + known.end_turn
            if turn.replace("{role}", role) in text:
                contents.add(content)
    return contents


def beginning(template: str, bos_token: str, known: ChatFormat) -> str:
    """Return the token that a template writes before everything, or ""."""
    if "bos_token" in template:  # a variable, which the tokenizer's own files give a value
        return bos_token or known.begin
    return LLAMA3.begin if LLAMA3.begin in template else ""


def own_system_message(template: str, known: ChatFormat) -> str:
    """Return the system message that a template writes if a conversation brings none, or "".

    It is the plain text between the opening and the end of a system turn. If quotes or braces stand
    between, the template inserts the conversation's own system message there.

    Raises InputError if the template seems to have one in another place, such as a variable. It
    could only be read by running the template, and without it the model would answer differently.
    """
    text = template.replace("\\n", "\n")
    text = re.sub(r"['\"]\s*\+\s*['\"]", "", text)  # 'a' + 'b' -> 'ab'
    opening = re.escape(known.open_turn.format(role="system"))
    match = re.search(opening + r"([^'\"{}]+)" + re.escape(known.end_turn), text)
    if match is not None:
        return match[1]
    if "You are" in text:  # nearly every system message begins with these words
        raise InputError(
            "the model's chat template has the words \"You are\", so probably a system message, "
            "outside a system turn: that is not supported, use another model"
        )
    return ""
