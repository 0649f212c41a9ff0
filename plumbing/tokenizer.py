"""Tokenizers: from text and conversations to token ids, and back.

A chat model has learned conversations in one format, in which control tokens such as <|im_end|>
mark who speaks and where a turn ends. (A turn is what one speaker says at once. plumbing/chat.py
has the formats.) Control tokens are written by their ids. If a message contains the characters of a
control token, they stay plain text, so that a message can neither end its turn nor open a new one.
"""
from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Iterator, NamedTuple

import tokenizers
from tokenizers import pre_tokenizers

from plumbing.chat import (
    CHATML,
    CONTROL_PATTERN,
    CONTROL_TOKENS,
    LLAMA3,
    ChatFormat,
    detect_chat_format,
)
from plumbing.errors import InputError, input_errors
from plumbing.files import read_json
from plumbing.gguf import parse_gguf
from plumbing.hub import resolve_path
from plumbing.huggingface import read_stop_ids
from plumbing.records import check_message

# --- Encoding and decoding ---


@dataclass
class Tokenizer:
    """A model's tokenizer, with its stop ids and its chat format. `load_tokenizer` makes one."""

    backend: tokenizers.Tokenizer
    stop_ids: set[int]
    template: str = ""  # the model's chat template, if it has one
    bos_token: str = ""

    @cached_property
    def chat_format(self) -> ChatFormat:
        """How the model's conversations are written. Raises InputError if the format is not
        supported; the tokenizer can then be used for plain text only."""
        return detect_chat_format(self.backend, self.template, self.bos_token)

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text. Even "<|im_end|>" is plain text here."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, without the control tokens."""
        return self.backend.decode(ids, skip_special_tokens=True)

    def encode_markup(self, markup: str, **fields: str) -> list[int]:
        r"""Return the ids of a piece of the chat format, such as "<|im_start|>{role}\n".

        The fields in braces are filled in after the control tokens have been found, so that the
        characters of a control token within a field stay plain text.
        """
        ids = []
        for part in CONTROL_PATTERN.split(markup):
            if part in CONTROL_TOKENS:
                ids.append(self.backend.token_to_id(part))
            else:
                ids += self.encode(part.format(**fields))
        return ids

    def opening(self, role: str) -> list[int]:
        """Return the ids that open a turn of `role`. Raises InputError."""
        return self.encode_markup(self.chat_format.open_turn, role=role)

    def turns(self, messages: list[dict]) -> Iterator[tuple[list[int], bool]]:
        r"""Yield a conversation in pieces: the ids of each, and whether the assistant generates
        them. One exchange in ChatML has four pieces:

            <|im_start|>user\nHi<|im_end|>\n    False
            <|im_start|>assistant\n             False
            Hello!<|im_end|>                    True
            \n                                  False

        An answer is encoded separately from its opening, because the opening is already encoded
        when the model generates the answer. If both were encoded together, the "\n" that ends the
        opening and a "\n" that begins the answer might merge into the one token "\n\n", and a
        drafter would be trained on ids that it never sees in generation.

        Raises InputError.
        """
        chat_format = self.chat_format
        has_system = bool(messages) and messages[0].get("role") == "system"
        if chat_format.system and not has_system:
            messages = [{"role": "system", "content": chat_format.system}, *messages]
        if chat_format.begin:
            yield [self.backend.token_to_id(chat_format.begin)], False
        for message in messages:
            check_message(message)
            role = message["role"]
            content = message["content"]
            if chat_format.strips:
                content = content.strip()
            if role == "assistant":
                end = self.backend.token_to_id(chat_format.end_token)
                yield self.opening(role), False
                yield [*self.encode(content), end], True
                yield self.encode(chat_format.separator), False
            else:
                turn = chat_format.open_turn + "{content}" + chat_format.end_turn
                yield self.encode_markup(turn, role=role, content=content), False

    def chat(self, messages: list[dict], add_generation_prompt: bool = True) -> list[int]:
        """Return the ids of a conversation [{"role", "content"}, ...] and, by default, the ids that
        open the assistant's next turn. Raises InputError."""
        ids = []
        for piece, _ in self.turns(messages):
            ids += piece
        if add_generation_prompt:
            ids += self.opening("assistant")
        return ids


class TextStream:
    """Turns tokens into text as they come.

    A token may end inside a character of several bytes. The text of such a token is held back until
    the character is complete. For example, " Hi😀" is four tokens of SmolLM2: " Hi", and three
    parts of the emoji. For these four, `add` returns " Hi", "", "" and "😀".
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.before: list[int] = []  # the tokens of the last text that `add` returned
        self.pending: list[int] = []  # the tokens after `before`: their text is still held back

    def add(self, token: int) -> str:
        """Return the new text up to and including this token, or "" if the text ends inside a
        character."""
        self.pending.append(token)
        text = self.pending_text()
        # The decoder writes "\ufffd" for bytes that are no whole character. A character has at most
        # 4 bytes, but a token may hold the end of one character and the beginning of the next, so
        # it may take more than 4 tokens until one ends where a character ends. After 8 tokens the
        # bytes are considered damaged, and "\ufffd" is returned in their place.
        if text.endswith("\ufffd") and len(self.pending) < 8:
            return ""
        self.before = self.pending
        self.pending = []
        return text

    def pending_text(self) -> str:
        """Return the text that `add` still holds back: at the end of an answer, nothing or half a
        character."""
        # Some decoders drop the space before the first token. The text of the pending tokens is
        # therefore found as what they add to the text of the tokens before.
        text = self.tokenizer.decode(self.before + self.pending)
        return text[len(self.tokenizer.decode(self.before)):]


# --- From files ---

# Llama-3.1's template writes a system turn that begins with these words and states today's date.
KNOWLEDGE_DATE = "Cutting Knowledge Date"


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a model's tokenizer, with the stop ids that its checkpoint states. Raises InputError.

    path: what `resolve_path` takes, or what it has returned.
    """
    path = resolve_path(path)
    read = read_gguf_tokenizer if path.suffix == ".gguf" else read_hugging_face_tokenizer
    tokenizer = read(path)
    print_notes(path, tokenizer)
    return tokenizer


def print_notes(path: Path, tokenizer: Tokenizer) -> None:
    """Tell the user what is assumed about the chat format, and what conversations leave out."""
    try:
        name = tokenizer.chat_format.name
    except InputError:  # raised again if the user asks for a conversation
        return
    if not tokenizer.template:
        print(f"{path} has no chat template: its format is taken for {name}'s", file=sys.stderr)
    if KNOWLEDGE_DATE in tokenizer.template:
        note = "states the date in a system turn, which is left out here"
        print(f"{path}: the chat template {note}", file=sys.stderr)


def build_tokenizer(
    backend: tokenizers.Tokenizer, stop_ids: list[int], template: str, bos_token: str
) -> Tokenizer:
    """Make a tokenizer from what a checkpoint states. Raises InputError for invalid stop ids."""
    for token in stop_ids:
        if type(token) is not int or token < 0:
            raise InputError(f"eos_token_id is invalid: {token!r:.40}")
    # Not every checkpoint marks its control tokens as such.
    present = [token for token in CONTROL_TOKENS if backend.token_to_id(token) is not None]
    backend.add_special_tokens(present)
    # The library's name for this setting misleads: True means that the characters "<|im_end|>" in a
    # message are encoded as plain text.
    backend.encode_special_tokens = True
    # Some checkpoints state only the base model's stop token, which does not end a turn.
    ends = [CHATML.end_token, LLAMA3.end_token]
    end_ids = [backend.token_to_id(token) for token in ends if token in present]
    return Tokenizer(backend, {*stop_ids, *end_ids}, template, bos_token)


# --- From a Hugging Face folder ---


def read_hugging_face_tokenizer(path: Path) -> Tokenizer:
    """Read the tokenizer and the chat template of a folder. Raises InputError."""
    file = path / "tokenizer.json"
    with input_errors(f"{file}: not a tokenizer", Exception):  # tokenizers raises nothing narrower
        backend = tokenizers.Tokenizer.from_file(str(file))
    # The file may ask for truncation and padding, which were needed only to train the model.
    backend.no_truncation()
    backend.no_padding()
    template, bos_token = read_template(path)
    return build_tokenizer(backend, read_stop_ids(path), template, bos_token)


def read_template(path: Path) -> tuple[str, str]:
    """Return the chat template of a folder and its bos_token, the token that begins a text. Either
    is "" if the folder states none. Raises InputError."""
    stated = {}
    if (path / "tokenizer_config.json").exists():
        stated = read_json(path / "tokenizer_config.json")
    template = stated.get("chat_template") or ""
    if isinstance(template, list):  # several templates, each with a name
        with input_errors(f"{path}: the list of chat templates is invalid", AttributeError):
            named = {one.get("name"): one.get("template") for one in template}
        template = named.get("default") or ""
    if (path / "chat_template.jinja").exists():
        template = (path / "chat_template.jinja").read_text(encoding="utf-8", errors="replace")
    bos_token = stated.get("bos_token") or ""
    if isinstance(bos_token, dict):
        bos_token = bos_token.get("content") or ""
    return str(template), str(bos_token)


# --- From a GGUF file ---

# Values of tokenizer.ggml.token_type:
CONTROL = 3
USER_DEFINED = 4  # a token of plain text that is never split
LLAMA3_PATTERN = (  # from Llama-3's tokenizer.json
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class GGUFPreTokenizer(NamedTuple):
    """How a text is split into pieces before BPE merges anything. No token crosses the border
    between two pieces."""

    steps: list[pre_tokenizers.PreTokenizer]
    ignore_merges: bool  # whether a piece that is itself a token becomes that token without merges


PRE_TOKENIZERS = {  # by name; a GGUF file states only the name
    "smollm": GGUFPreTokenizer(
        steps=[  # split off single digits, then split the rest as GPT-2 does (use_regex)
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ],
        ignore_merges=False,
    ),
    "llama-bpe": GGUFPreTokenizer(
        steps=[
            pre_tokenizers.Split(tokenizers.Regex(LLAMA3_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ],
        ignore_merges=True,
    ),
}


def read_gguf_tokenizer(path: Path) -> Tokenizer:
    """Read the tokenizer and the chat template of a GGUF file. Raises InputError."""
    metadata = parse_gguf(path).metadata
    with input_errors(f"{path}: not a tokenizer of type smollm or llama-bpe", Exception):
        backend = build_gguf_tokenizer(metadata)
        bos_token = ""
        if "tokenizer.ggml.bos_token_id" in metadata:
            bos_token = backend.id_to_token(metadata["tokenizer.ggml.bos_token_id"])
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    stop_ids = [metadata[key] for key in keys if key in metadata]
    template = str(metadata.get("tokenizer.chat_template", ""))
    return build_tokenizer(backend, stop_ids, template, bos_token)


def build_gguf_tokenizer(metadata: dict) -> tokenizers.Tokenizer:
    """Make a byte-level BPE tokenizer from a vocabulary and merges. If the metadata are damaged, it
    may raise exceptions of any type."""
    steps, ignore_merges = PRE_TOKENIZERS[metadata["tokenizer.ggml.pre"]]
    tokens = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    model = tokenizers.models.BPE(vocabulary, merges, ignore_merges=ignore_merges)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = tokenizers.decoders.ByteLevel()
    for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True):
        if kind == CONTROL:
            backend.add_special_tokens([token])
        if kind == USER_DEFINED:
            backend.add_tokens([token])
    return backend
