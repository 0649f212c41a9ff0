"""Tiny random targets, drafters and tokenizers, which tests of all scripts share."""
import json
import math
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import tokenizers
import torch

from app import loading
from llama import Config, GenerationConfig, Llama, generate
from moa import Drafter, default_config

PROMPT = [0, 3, 1, 4]
CHATML = ["<|im_start|>", "<|im_end|>"]
LLAMA3 = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]
CHATML_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3_TEMPLATE = (  # as published with Llama-3
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = "
    "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim"
    " + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LETTERS = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
# A safetensors file of a type that PyTorch lacks.
SIX_BITS_HEADER = b'{"norm.weight": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}'
SIX_BITS = struct.pack("<Q", len(SIX_BITS_HEADER)) + SIX_BITS_HEADER + bytes(3)
WORDS = SimpleNamespace(  # for a tokenizer
    chat=lambda messages: [sum(message["content"].encode()) % 16 for message in messages],
    decode=lambda ids: " ".join(map(str, ids)),
)


def new_target(
    vocab_size: int, layers: int = 4, sharpness: float = 3.0, context: int = 64
) -> Llama:
    """The larger `sharpness`, the less its distributions are like each other and like uniform."""
    torch.manual_seed(0)
    config = Config(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=context,
    )
    model = Llama(config)
    model.lm_head.weight.mul_(sharpness)
    return model


def new_drafter(
    target: Llama,
    likeness: float = 0.0,
    draft_vocabulary: tuple[int, ...] | None = None,
    **choices,
) -> Drafter:
    """A random drafter, its config the default one except for `choices`.

    With all target layers reused, likeness 1 makes it the target itself: SA and CA add nothing.
    """
    torch.manual_seed(1)
    config = replace(default_config(target), **choices)
    drafter = loading.new_drafter(target, config, draft_vocabulary)
    drafter.requires_grad_(False)
    if likeness > 0:
        for layer in (drafter.self_attention, drafter.cross_attention):
            layer.self_attn.o_proj.weight.mul_(1 - likeness)
            layer.mlp.down_proj.weight.mul_(1 - likeness)
    return drafter


def target_alone(target: Llama, count: int, **choices) -> list[int]:
    """The tokens that the target writes after PROMPT."""
    return list(generate(target, PROMPT, GenerationConfig(count, **choices)))


def ask(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def chi_square(drawn: torch.Tensor, p: torch.Tensor) -> float:
    """Pearson's statistic of draws from p. Infinite where something of probability 0 was drawn."""
    expected = len(drawn) * p
    terms = (drawn.bincount(minlength=len(p)) - expected) ** 2 / expected
    return terms.nan_to_num(0, posinf=math.inf).sum().item()


def byte_tokenizer(
    folder: Path, control_tokens: list[str], letters: list[str] = LETTERS
) -> Path:
    """A folder with a tokenizer of bytes, and the chat template of its control tokens.

    That its control tokens are unmarked and that its training truncated and padded must not matter.
    """
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_tokens(control_tokens)
    backend.enable_truncation(40)
    backend.enable_padding(length=40)
    backend.save(str(folder / "tokenizer.json"))
    templates = {CHATML[0]: CHATML_TEMPLATE, LLAMA3[0]: LLAMA3_TEMPLATE}
    stated = {"chat_template": templates.get(control_tokens[0]), "bos_token": control_tokens[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    return folder
