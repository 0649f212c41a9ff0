"""Tokenizers: from text and conversations to token ids, and back.

`load_tokenizer` reads a model's tokenizer from its folder or .gguf file. Every program uses

    tokenizer.encode(text)        the ids of plain text
    tokenizer.decode(ids)         the text of ids; `TextStream` does it token by token
    tokenizer.chat(messages)      the ids of a conversation, as its model has learned to read it
    tokenizer.turns(messages)     the same to train on, with what of it the assistant generates

In a conversation, control tokens such as <|im_end|> mark who speaks and where a turn ends: see
plumbing/chat.py. If a message contains the characters of a control token, they are encoded as plain
text, so that a message can neither end its turn nor open a new one.
"""
from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Iterator

import tokenizers
from tokenizers import pre_tokenizers

from plumbing.chat import MARK, ChatTemplate
from plumbing.errors import InputError, input_errors
from plumbing.files import read_json
from plumbing.gguf import parse_gguf
from plumbing.hub import resolve_path
from plumbing.huggingface import read_stop_ids

# --- Encoding and decoding ---

# A byte-level vocabulary spells a byte by a letter: by its own, if it has one that can be seen,
# else by the next one from 256 on.
SEEN = [*range(33, 127), *range(161, 173), *range(174, 256)]
UNSEEN = sorted(set(range(256)).difference(SEEN))
BYTES = {chr(byte): byte for byte in SEEN}
BYTES |= {chr(256 + i): byte for i, byte in enumerate(UNSEEN)}


@dataclass
class Tokenizer:
    """A model's tokenizer, with its stop ids and its chat template. `load_tokenizer` makes one."""

    backend: tokenizers.Tokenizer
    stop_ids: set[int]
    template: str = ""  # the chat template, in Jinja
    names: dict[str, str] = field(default_factory=dict)  # what it calls special tokens

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text. Even "<|im_end|>" is plain text here."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, without the control tokens."""
        return self.backend.decode(ids, skip_special_tokens=True)

    def escaped_bytes(self, token: int) -> str:
        r"""Return the bytes of a token of a byte-level vocabulary, as in "\xf0\x9f"."""
        letters = self.backend.id_to_token(token) or ""
        return repr(bytes(BYTES[letter] for letter in letters if letter in BYTES))[2:-1]

    @cached_property
    def control_ids(self) -> dict[str, int]:
        """The ids of all control tokens."""
        added = self.backend.get_added_tokens_decoder()
        return {token.content: i for i, token in added.items() if token.special}

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """How the model's conversations are written. Raises InputError if that is unknown; the
        tokenizer can then be used for plain text only."""
        if not self.template:
            raise InputError(
                "the model has no chat template: use a chat model, or write its template to "
                "chat_template.jinja in its folder"
            )
        if self.backend.encode("a", add_special_tokens=False).tokens != ["a"]:
            raise InputError(
                "the tokenizer marks where a text begins, as SentencePiece does, and so cannot "
                "encode a conversation in pieces: use a model with a byte-level tokenizer"
            )
        return ChatTemplate(self.template, self.names, self.control_ids)

    def encode_markup(self, markup: str) -> list[int]:
        """Return the ids of markup: control tokens by their ids, all else as plain text."""
        ids = []
        for part in re.split(f"({self.chat_template.control_pattern})", markup):
            if part in self.control_ids:
                ids.append(self.control_ids[part])
            else:
                ids += self.encode(part.replace(MARK, ""))
        return ids

    def turns(self, messages: list[dict]) -> Iterator[tuple[list[int], bool]]:
        """Yield a conversation to train on in pieces: the ids of each, and whether the assistant
        generates them. Raises InputError (see `ChatTemplate.turns`)."""
        for markup, is_answer in list(self.chat_template.turns(messages)):  # first, all errors
            yield self.encode_markup(markup), is_answer

    def chat(self, messages: list[dict], add_generation_prompt: bool = True) -> list[int]:
        """Return the ids of a conversation [{"role", "content"}, ...] and, by default, the ids that
        open the assistant's next turn. Raises InputError."""
        template = self.chat_template
        return self.encode_markup(
            template.render(template.protect(messages), add_generation_prompt)
        )


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


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a model's tokenizer, with the stop ids that its checkpoint states. Raises InputError.

    path: what `resolve_path` takes, or what it has returned.
    """
    path = resolve_path(path)
    if path.suffix == ".gguf":
        return read_gguf_tokenizer(path)
    return read_hugging_face_tokenizer(path)


def build_tokenizer(
    backend: tokenizers.Tokenizer, stop_ids: list[int], template: str, names: dict[str, str]
) -> Tokenizer:
    """Make a tokenizer from what a checkpoint states. Raises InputError for invalid stop ids."""
    for token in stop_ids:
        if type(token) is not int or token < 0:
            raise InputError(f"eos_token_id is invalid: {token!r:.40}")
    # Not every checkpoint marks its control tokens as such.
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    backend.add_special_tokens([token for token in added if re.fullmatch(r"<\|\w+\|>", token)])
    # The library's name for this setting misleads: True means that the characters "<|im_end|>" in a
    # message are encoded as plain text.
    backend.encode_special_tokens = True
    tokenizer = Tokenizer(backend, set(stop_ids), template, names)
    # Some checkpoints state only the base model's stop token, which does not end a turn.
    with suppress(InputError):  # raised again if the user asks for a conversation
        tokenizer.stop_ids.add(tokenizer.control_ids[tokenizer.chat_template.end_of_answer])
    return tokenizer


# --- From a Hugging Face folder ---


def read_hugging_face_tokenizer(path: Path) -> Tokenizer:
    """Read the tokenizer and the chat template of a folder. Raises InputError."""
    file = path / "tokenizer.json"
    with input_errors(f"{file}: not a tokenizer", Exception):  # tokenizers raises nothing narrower
        backend = tokenizers.Tokenizer.from_file(str(file))
    # The file may ask for truncation and padding, which were needed only to train the model.
    backend.no_truncation()
    backend.no_padding()
    template, names = read_template(path)
    return build_tokenizer(backend, read_stop_ids(path), template, names)


def read_template(path: Path) -> tuple[str, dict[str, str]]:
    """Return the chat template of a folder, or "", and what the template calls special tokens, such
    as {"bos_token": "<s>"}. Raises InputError."""
    stated = {}
    if (path / "tokenizer_config.json").exists():
        stated = read_json(path / "tokenizer_config.json")
    template = stated.get("chat_template") or ""
    with input_errors(f"{path}: the chat template cannot be read", Exception):
        if isinstance(template, list):  # several templates, each with a name
            template = {one["name"]: one["template"] for one in template}["default"]
        if (path / "chat_template.jinja").exists():
            template = (path / "chat_template.jinja").read_text(encoding="utf-8")
    names = {}
    for name in ("bos_token", "eos_token"):
        match stated.get(name):
            case str(token) | {"content": str(token)}:
                names[name] = token
    return str(template), names


# --- From a GGUF file ---

# Values of tokenizer.ggml.token_type:
CONTROL = 3
USER_DEFINED = 4  # a token of plain text that is never split
SPECIAL_IDS = {  # keys, by what a chat template calls the token
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
}
LLAMA3_PATTERN = (  # from Llama-3's tokenizer.json
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# How a text is split into pieces before BPE merges anything. No token crosses the border between
# two pieces. A GGUF file states only a name.
PRE_TOKENIZERS = {
    "smollm": [  # split off single digits, then split the rest as GPT-2 does (use_regex)
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ],
    "llama-bpe": [
        pre_tokenizers.Split(tokenizers.Regex(LLAMA3_PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}


def read_gguf_tokenizer(path: Path) -> Tokenizer:
    """Read the tokenizer and the chat template of a GGUF file. Raises InputError."""
    metadata = parse_gguf(path).metadata
    with input_errors(f"{path}: not a tokenizer of type smollm or llama-bpe", Exception):
        backend = build_gguf_tokenizer(metadata)
        ids = {name: metadata[key] for name, key in SPECIAL_IDS.items() if key in metadata}
        names = {name: backend.id_to_token(token) for name, token in ids.items()}
    stop_ids = [ids["eos_token"]] if "eos_token" in ids else []
    template = str(metadata.get("tokenizer.chat_template", ""))
    return build_tokenizer(backend, stop_ids, template, names)


def build_gguf_tokenizer(metadata: dict) -> tokenizers.Tokenizer:
    """Make a byte-level BPE tokenizer from a vocabulary and merges. If the metadata are damaged, it
    may raise exceptions of any type."""
    name = metadata["tokenizer.ggml.pre"]
    tokens = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    # With Llama-3 a piece that is itself a token becomes that token without merges.
    model = tokenizers.models.BPE(vocabulary, merges, ignore_merges=name == "llama-bpe")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[name])
    backend.decoder = tokenizers.decoders.ByteLevel()
    for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True):
        if kind == CONTROL:
            backend.add_special_tokens([token])
        if kind == USER_DEFINED:
            backend.add_tokens([token])
    return backend
