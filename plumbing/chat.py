r"""Chat formats: the two that are supported, and which one a model has learned.

A chat format says how a conversation is written as one text. In ChatML, a question and the opening
of its answer are:

    <|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n

A checkpoint states its format as a chat template, which is a program in the language Jinja. The
template is not run here: running it would need a package that is not among this project's
requirements (jinja2), and would execute what a stranger wrote. Instead, four facts are read from
the text of the template: which turns it writes, whether it drops the spaces around a message, the
token that it begins with, and its default system message. A template that writes other turns is
refused.

Reading a template without running it has two limits:

- A template that mentions bos_token anywhere is taken to begin with this token, even if bos_token
  stands in a branch that would not run.
- A default system message that is not written within a system turn is recognized only by the words
  "You are". The template is then refused. Without these words the message goes unnoticed.
"""
from __future__ import annotations

import re
from dataclasses import dataclass, replace

import tokenizers

from plumbing.errors import InputError

CONTROL_TOKENS = (  # those of both formats
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
CONTROL_PATTERN = re.compile(r"(<\|\w+\|>)")  # parentheses make `split` return the tokens as well


@dataclass(frozen=True)
class ChatFormat:
    """How a conversation is written. The texts contain control tokens."""

    name: str
    begin: str  # the token before everything, or ""
    open_turn: str  # with {role} in it
    end_token: str  # the token that ends a turn
    separator: str  # the text between that token and the next turn
    strips: bool  # whether spaces around a message are dropped
    system: str = ""  # the system message of a conversation that has none of its own, or ""

    @property
    def end_turn(self) -> str:
        return self.end_token + self.separator


CHATML = ChatFormat(
    name="ChatML",
    begin="",
    open_turn="<|im_start|>{role}\n",
    end_token="<|im_end|>",
    separator="\n",
    strips=False,
)
LLAMA3 = ChatFormat(
    name="Llama-3",
    begin="<|begin_of_text|>",
    open_turn="<|start_header_id|>{role}<|end_header_id|>\n\n",
    end_token="<|eot_id|>",
    separator="",
    strips=True,
)
SUPPORTED_FORMATS = "only ChatML and Llama-3 are supported"


# --- Which format a model has learned ---


def detect_chat_format(
    backend: tokenizers.Tokenizer, template: str, bos_token: str
) -> ChatFormat:
    """Return a model's chat format: the one that its template writes or, if the template is "", the
    one that its control tokens suggest. Raises InputError if conversations cannot be written for
    the model."""
    if template:
        chosen = recognize_template(template, bos_token)
    elif backend.token_to_id("<|im_start|>") is not None:
        chosen = CHATML
    else:
        chosen = LLAMA3
    check_tokenizer(backend, chosen)
    return chosen


def recognize_template(template: str, bos_token: str) -> ChatFormat:
    r"""Return the format that a chat template writes. Raises InputError if it is not supported.

    For example, from this template (somewhat shortened)

        {{ bos_token }}{{ '<|im_start|>system\nBe brief.' + '<|im_end|>\n' }}{% for ... %}
        {{ '<|im_start|>' + message.role + '\n' + message.content | trim + '<|im_end|>\n' }}

    the functions below return:

        join_literals             ... '<|im_start|>system\nBe brief.<|im_end|>\n' ...
        written_text              ... <|im_start|>{role}\n{stripped}<|im_end|>\n ...
        turn_content              {stripped} for ChatML: turns of ChatML, without outer spaces
        begin_token               the value of bos_token
        default_system_message    Be brief.
    """
    source = join_literals(template)
    text = written_text(source)
    for known in (CHATML, LLAMA3):
        content = turn_content(text, known)
        if content is not None:
            return replace(
                known,
                begin=begin_token(source, bos_token, known),
                strips=content == "{stripped}",
                system=default_system_message(source, known),
            )
    raise InputError(f"the model's chat template has an unknown format: {SUPPORTED_FORMATS}")


def join_literals(template: str) -> str:
    r"""Return a template in which the two characters \n have become a line end, and neighboring
    literals have become one.

        'system\nBe brief.' + '<|im_end|>\n'    becomes, with real line ends,
        'system\nBe brief.<|im_end|>\n'
    """
    source = template.replace("\\n", "\n")
    return re.sub(r"['\"]\s*\+\s*['\"]", "", source)


def written_text(source: str) -> str:
    r"""Return a template without Jinja's quotes and plus signs. {role} and {content} stand where
    the template inserts a message's role and content, and {stripped} where it inserts the content
    without the spaces around it. The three steps turn the first line of this example into the last:

        '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>'
        '<|im_start|>' + {role} + '\n' + {content} | trim + '<|im_end|>'
        '<|im_start|>' + {role} + '\n' + {stripped} + '<|im_end|>'
        <|im_start|>{role}\n{stripped}<|im_end|>
    """
    text = source
    for name in ("role", "content"):  # message['role'] or message.role -> {role}
        text = re.sub(rf"\w+(\.{name}\b|\[['\"]{name}['\"]\])", f"{{{name}}}", text)
    # {content} | trim or {content}.strip() -> {stripped}
    text = re.sub(r"\{content\}(\s*\|\s*trim\b|\.strip\(\))", "{stripped}", text)
    return re.sub(r"['\"]|\s*\+\s*", "", text)  # 'a' + b -> ab


def turn_content(text: str, known: ChatFormat) -> str | None:
    """Return what stands for the message in the turns that a template writes in a known format:
    "{content}" or "{stripped}". text: what `written_text` returns.

    Return None if there are no turns in this format. Also return None if {content} stands in some
    turns and {stripped} in others: the template drops the spaces for some roles only, which is not
    supported.
    """
    contents = set()
    for role in ("{role}", "user", "assistant"):  # a turn for all roles, or one for each
        for content in ("{content}", "{stripped}"):
            turn = known.open_turn + content + known.end_turn
            if turn.replace("{role}", role) in text:
                contents.add(content)
    return contents.pop() if len(contents) == 1 else None


def begin_token(source: str, bos_token: str, known: ChatFormat) -> str:
    """Return the token that a template writes before everything, or ""."""
    if "bos_token" in source:  # a variable, whose value the checkpoint states
        return bos_token or known.begin
    # Also for ChatML: a Llama-3 that was fine-tuned on ChatML still begins with this token.
    return LLAMA3.begin if LLAMA3.begin in source else ""


def default_system_message(source: str, known: ChatFormat) -> str:
    """Return the system message that a template writes if a conversation has none, or "".

    The message is the plain text between the opening and the end of a system turn. If quotes or
    braces stand between the two, the template inserts the system message of the conversation.

    Raises InputError if the template seems to have a system message in a different place, such as a
    variable. Only running the template would tell what the message is, and without the message the
    model would answer differently.
    """
    opening = re.escape(known.open_turn.format(role="system"))
    match = re.search(opening + r"([^'\"{}]+)" + re.escape(known.end_turn), source)
    if match is not None:
        return match[1]
    if "You are" in source:  # nearly every system message begins with these words
        raise InputError(
            "the model's chat template has the words \"You are\", so probably a system message, "
            "outside a system turn: that is not supported, use another model"
        )
    return ""


# --- Whether a tokenizer can encode a format ---


def check_tokenizer(backend: tokenizers.Tokenizer, chosen: ChatFormat) -> None:
    """Raise InputError if a tokenizer cannot encode conversations in this format."""
    needed = CONTROL_PATTERN.findall(chosen.open_turn + chosen.end_turn)
    if chosen.begin:  # any token that the checkpoint states, such as <s>
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


def marks_beginnings(backend: tokenizers.Tokenizer) -> bool:
    """Return whether a tokenizer puts a mark or a space before the first word of a text."""
    text = "a"
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    if backend.pre_tokenizer is not None:
        text = "".join(piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text))
    return text != "a"
