"""Text and conversations to token ids, and back.

A chat model has learned conversations in one format, in which control tokens such as <|im_end|>
mark who speaks and where a turn ends. In ChatML a question, and the opening of its answer:

    <|im_start|>user\\nWhy is the sky blue?<|im_end|>\\n<|im_start|>assistant\\n

Which format it is, the model's own chat template says. That is a program in a language of its own
(Jinja), which is not run here: ChatML's and Llama-3's are recognised by the control tokens in their
text, and anything else is refused. Control tokens are written by their ids. The same characters in
a message stay plain text, so that a message can neither end its turn nor open another.
"""
from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Iterator

import tokenizers

from plumbing.errors import InputError, input_errors
from plumbing.files import read_json
from plumbing.gguf import parse_gguf
from plumbing.hub import resolve_path
from plumbing.huggingface import read_stop_ids

# --- Chat formats ---

ROLES = ("system", "user", "assistant")
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
    """How a conversation is written."""

    name: str
    begin: str  # the token before everything, if there is one
    open_turn: str
    end_turn: str
    strips: bool  # drop spaces around a message
    system: str = ""  # the message that begins a conversation without a system message


CHATML = ChatFormat("ChatML", "", "<|im_start|>{role}\n", "<|im_end|>\n", strips=False)
LLAMA3 = ChatFormat(
    "Llama-3",
    "<|begin_of_text|>",
    "<|start_header_id|>{role}<|end_header_id|>\n\n",
    "<|eot_id|>",
    strips=True,
)
# A chat template that writes ChatML.
CHATML_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def recognise_format(template: str, bos_token: str) -> ChatFormat | None:
    """Return the format that a chat template writes, or None if it is no known one."""
    text = re.sub(r"['\"]\s*\+\s*['\"]", "", template)  # 'a' + 'b' -> 'ab'
    text = text.replace("\\n", "\n")
    for known in (CHATML, LLAMA3):
        if known.open_turn.format(role="assistant") in text and known.end_turn in text:
            begin = ""
            if "bos_token" in text:
                begin = bos_token or known.begin
            elif LLAMA3.begin in text:
                begin = LLAMA3.begin
            # Some templates have a system message of their own. With quotes or braces of Jinja in
            # between, it is the conversation's that is put together there.
            opening = re.escape(known.open_turn.format(role="system"))
            match = re.search(opening + r"([^'\"{}]+)" + re.escape(known.end_turn), text)
            if match is None and "You are" in text:  # one that is written in another way
                return None
            system = match[1] if match else ""
            strips = "trim" in text or ".strip()" in text
            return replace(known, begin=begin, strips=strips, system=system)
    return None


def choose_format(
    backend: tokenizers.Tokenizer, template: str, bos_token: str
) -> tuple[ChatFormat | None, str]:
    """Return a model's chat format or, without one, why its conversations cannot be written."""
    formats = "only ChatML and Llama-3 are supported"
    if template:
        chosen = recognise_format(template, bos_token)
        if chosen is None:
            return None, f"the model's chat template is of another format: {formats}"
    else:
        chosen = CHATML if backend.token_to_id("<|im_start|>") is not None else LLAMA3
    for token in CONTROL_PATTERN.findall(chosen.open_turn + chosen.end_turn) + [chosen.begin]:
        if token and backend.token_to_id(token) is None:
            return None, f"the tokenizer has no token {token} of a chat format: {formats}"
    if marks_beginnings(backend):
        return None, (
            "the tokenizer marks where a text begins, as SentencePiece does, and so cannot encode "
            "a conversation in pieces: use a model with a byte-level tokenizer"
        )
    return chosen, ""


def marks_beginnings(backend: tokenizers.Tokenizer) -> bool:
    """Tell whether a text gets a mark or a space before its first word."""
    text = "a"
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    if backend.pre_tokenizer is not None:
        text = "".join(piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text))
    return text != "a"


def check_message(message: dict) -> None:
    """Raises InputError for what is not a turn of a chat."""
    role = message.get("role")
    content = message.get("content")
    if role not in ROLES or not isinstance(content, str):
        raise InputError(
            f"a message needs a role ({', '.join(ROLES)}) and text as content, "
            f"not {message!r:.100}"
        )
    with input_errors("the text is not valid UTF-8", UnicodeError):
        content.encode()  # JSON and the command line may hold half a surrogate pair


class Tokenizer:
    """Text and conversations to token ids, and back."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        stop_ids: list[int],
        template: str = "",
        bos_token: str = "",
    ):
        for token in stop_ids:
            if type(token) is not int or token < 0:
                raise InputError(f"eos_token_id is invalid: {token!r:.40}")
        self.backend = backend
        self.stop_ids = set(stop_ids)
        present = [token for token in CONTROL_TOKENS if backend.token_to_id(token) is not None]
        backend.add_special_tokens(present)
        # The name misleads: True means that "<|im_end|>" within a message is encoded as plain text.
        backend.encode_special_tokens = True
        self.has_template = bool(template)
        self.states_date = "Cutting Knowledge Date" in template  # as Llama-3.1's does
        self.format, self.refusal = choose_format(backend, template, bos_token)
        for known in (CHATML, LLAMA3):  # some checkpoints state only the base model's stop token
            end_of_turn = backend.token_to_id(known.end_turn.strip())
            if end_of_turn is not None:
                self.stop_ids.add(end_of_turn)

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text, even of "<|im_end|>"."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, without the control tokens."""
        return self.backend.decode(ids, skip_special_tokens=True)

    def encode_template(self, template: str, **fields: str) -> list[int]:
        """Return the ids of a part of the chat format: control tokens, and text with the fields
        filled in."""
        ids = []
        for part in CONTROL_PATTERN.split(template):
            if part in CONTROL_TOKENS:
                ids.append(self.backend.token_to_id(part))
            else:
                ids += self.encode(part.format(**fields))
        return ids

    def opening(self, role: str) -> list[int]:
        """Return the ids that open a turn of `role`. Raises InputError."""
        if self.format is None:
            raise InputError(self.refusal)
        return self.encode_template(self.format.open_turn, role=role)

    def turns(self, messages: list[dict]) -> Iterator[tuple[list[int], bool]]:
        """Yield a conversation in pieces (ids, whether they are the assistant's own).

        Raises InputError.
        """
        if self.format is None:
            raise InputError(self.refusal)
        is_without_system = not messages or messages[0].get("role") != "system"
        if self.format.system and is_without_system:
            messages = [{"role": "system", "content": self.format.system}, *messages]
        if self.format.begin:
            yield [self.backend.token_to_id(self.format.begin)], False
        for message in messages:
            check_message(message)
            role = message["role"]
            content = message["content"]
            if self.format.strips:
                content = content.strip()
            if role == "assistant":  # encoded apart from its opening, as it was generated
                # "<|im_end|>", which is the assistant's own, and "\n", which is not.
                end, *separator = self.encode_template(self.format.end_turn)
                yield self.opening(role), False
                yield [*self.encode(content), end], True
                yield separator, False
            else:
                turn = self.format.open_turn + "{content}" + self.format.end_turn
                yield self.encode_template(turn, role=role, content=content), False

    def chat(self, messages: list[dict], add_generation_prompt: bool = True) -> list[int]:
        """Return the ids of a conversation [{"role", "content"}, ...] and, by default, those that
        open the assistant's next turn. Raises InputError."""
        ids = []
        for piece, _ in self.turns(messages):
            ids += piece
        if add_generation_prompt:
            ids += self.opening("assistant")
        return ids


class TextStream:
    """Turns tokens into text as they come."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.before: list[int] = []  # those whose text was returned last, a context for the next
        self.pending: list[int] = []  # tokens after them that do not end on a whole character yet

    def add(self, token: int) -> str:
        """Return the text up to this token, or nothing as long as it ends inside a character."""
        self.pending.append(token)
        text = self.rest()
        # A character has at most 4 bytes. Tokens may split several in a row: but after 8 tokens
        # without a whole one, take it for damaged, and wait no longer.
        if text.endswith("\ufffd") and len(self.pending) < 8:
            return ""
        self.before = self.pending
        self.pending = []
        return text

    def rest(self) -> str:
        """Return the text of the pending tokens: at the end of an answer, half a character."""
        # Some decoders drop a leading space: only after other tokens a token has its full text.
        text = self.tokenizer.decode(self.before + self.pending)
        return text[len(self.tokenizer.decode(self.before)):]


# --- From files ---

# How Llama-3 splits text before merging, from its tokenizer.json.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Kinds of tokens in a GGUF file:
GGUF_CONTROL = 3
GGUF_USER_DEFINED = 4  # text, but never split


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a model's tokenizer, with the stop ids its checkpoint states. Raises InputError."""
    path = resolve_path(path)
    read = read_gguf_tokenizer if path.suffix == ".gguf" else read_hugging_face_tokenizer
    tokenizer = read(path)
    if not tokenizer.has_template and tokenizer.format is not None:
        name = tokenizer.format.name
        print(f"{path} has no chat template: its format is taken for {name}'s", file=sys.stderr)
    if tokenizer.states_date:
        note = "states the date in a system turn, which is left out here"
        print(f"{path}: the chat template {note}", file=sys.stderr)
    return tokenizer


def read_hugging_face_tokenizer(path: Path) -> Tokenizer:
    """Read the tokenizer and the chat template of a folder. Raises InputError."""
    file = path / "tokenizer.json"
    with input_errors(f"{file}: not a tokenizer", Exception):  # tokenizers raises no other
        backend = tokenizers.Tokenizer.from_file(str(file))
    backend.no_truncation()  # which the file may ask for, from the model's training
    backend.no_padding()
    template, bos_token = read_template(path)
    return Tokenizer(backend, read_stop_ids(path), template, bos_token)


def read_template(path: Path) -> tuple[str, str]:
    """Return the chat template of a folder and the token that begins texts, each "" where the
    folder states none. Raises InputError."""
    stated = {}
    if (path / "tokenizer_config.json").exists():
        stated = read_json(path / "tokenizer_config.json")
    template = stated.get("chat_template") or ""
    if isinstance(template, list):  # several, each with a name
        named = {one.get("name"): one.get("template") for one in template}
        template = named.get("default") or ""
    if (path / "chat_template.jinja").exists():
        template = (path / "chat_template.jinja").read_text(encoding="utf-8", errors="replace")
    bos_token = stated.get("bos_token") or ""
    if isinstance(bos_token, dict):
        bos_token = bos_token.get("content")
    return str(template), str(bos_token)


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
    return Tokenizer(backend, stop_ids, template, bos_token)


def build_gguf_tokenizer(metadata: dict) -> tokenizers.Tokenizer:
    """Byte-level BPE from a vocabulary and merges. Raises many kinds of exceptions."""
    # BPE first splits a text into pieces, and no token crosses a piece. The file only names the
    # rule for that. Llama-3's is one pattern. SmolLM's cuts out single digits, then splits as GPT-2
    # does, which is what use_regex means below.
    pre_tokenizers = tokenizers.pre_tokenizers
    splits = {
        "smollm": pre_tokenizers.Digits(individual_digits=True),
        "llama-bpe": pre_tokenizers.Split(tokenizers.Regex(LLAMA3_PATTERN), "isolated"),
    }
    split_name = metadata["tokenizer.ggml.pre"]
    is_llama3 = split_name == "llama-bpe"
    tokens = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    # ignore_merges: Llama-3 takes a piece that is itself a token as that token, and merges nothing.
    model = tokenizers.models.BPE(vocabulary, merges, ignore_merges=is_llama3)
    backend = tokenizers.Tokenizer(model)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not is_llama3)
    backend.pre_tokenizer = pre_tokenizers.Sequence([splits[split_name], byte_level])
    backend.decoder = tokenizers.decoders.ByteLevel()
    for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True):
        if kind == GGUF_CONTROL:
            backend.add_special_tokens([token])
        if kind == GGUF_USER_DEFINED:
            backend.add_tokens([token])
    return backend
