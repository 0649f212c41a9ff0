"""GGUF, the file format of llama.cpp: sizes, a tokenizer and tensors in one file, little-endian.

    "GGUF", version, number of tensors, number of metadata
    metadata    of each: key (a string), type id, value
    tensors     of each: name, number of dimensions, dimensions, type id, where its data begin
    padding     up to a multiple of the alignment
    data

A string is its length and its bytes. An array is the type id of its items, their number, and the
items. Quantized types store weights in blocks of 32, with float16 scales:

    Q8_0    scale, 32 signed bytes           weight = byte * scale
    Q4_0    scale, 32 half bytes             weight = (half byte - 8) * scale
    Q4_1    scale, minimum, 32 half bytes    weight = half byte * scale + minimum

(Q6_K has blocks of 256, with a scale for all and one for each 16. Llama.cpp writes the LM head of
Q4_0 files in it.) They are decoded here, once: nothing in this repository multiplies quantized
weights.
"""
from __future__ import annotations

import math
import mmap
import struct
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from plumbing.errors import InputError, input_errors
from plumbing.huggingface import Readers, parse_config

GGUF_NUMBERS = "BbHhIif?__Qqd"  # `struct`'s letters for type ids 0 to 12, except these two:
GGUF_STRING = 8
GGUF_ARRAY = 9

GGUF_CONFIG = {
    "model_type": "general.architecture",
    "hidden_size": "llama.embedding_length",
    "intermediate_size": "llama.feed_forward_length",
    "num_hidden_layers": "llama.block_count",
    "num_attention_heads": "llama.attention.head_count",
    "num_key_value_heads": "llama.attention.head_count_kv",
    "head_dim": "llama.attention.key_length",
    "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
    "rope_theta": "llama.rope.freq_base",
    "rope_type": "llama.rope.scaling.type",
    "factor": "llama.rope.scaling.factor",
    "rotary_dim": "llama.rope.dimension_count",
    "max_position_embeddings": "llama.context_length",
}
GGUF_NAMES = {
    "blk": "layers",
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFTensor(NamedTuple):
    """Where a tensor lies in a GGUF file."""

    shape: tuple[int, ...]
    type_id: int
    start: int  # in the file's data


class GGUFFile(NamedTuple):
    """What a GGUF file holds. The data, bytes, are memory-mapped."""

    path: Path
    metadata: dict
    tensors: dict[str, GGUFTensor]
    data: Tensor


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Split bytes into numbers of 2 or 4 bits: the lowest bits of all bytes, then the next."""
    parts = [packed >> shift & 2**bits - 1 for shift in range(0, 8, bits)]
    return torch.cat(parts, dim=-1).float()


def decode_q8_0(scale: Tensor, signed: Tensor) -> Tensor:
    return signed.view(torch.int8).float() * scale.view(torch.float16)


def decode_q4_0(scale: Tensor, packed: Tensor) -> Tensor:
    return (unpack(packed, bits=4) - 8) * scale.view(torch.float16)


def decode_q4_1(scale: Tensor, minimum: Tensor, packed: Tensor) -> Tensor:
    return unpack(packed, bits=4) * scale.view(torch.float16) + minimum.view(torch.float16)


def decode_q6_k(low: Tensor, high: Tensor, scales: Tensor, scale: Tensor) -> Tensor:
    """Weights of 6 bits, 128 at a time: 64 bytes hold their low 4 bits, 32 bytes their high 2."""
    low = unpack(low.unflatten(1, (2, 64)), bits=4)  # (n, 2, 128)
    high = unpack(high.unflatten(1, (2, 32)), bits=2)  # (n, 2, 128)
    weights = (low + 16 * high - 32).view(-1, 16, 16)
    scales = scales.view(torch.int8).float() * scale.view(torch.float16)  # (n, 16)
    return weights * scales.unsqueeze(-1)


# By type id: the weights in a block, how many bytes each of its parts has, and what turns the parts
# of n blocks, each (n, bytes), into their weights.
GGUF_TYPES = {
    0: (1, [4], lambda stored: stored.view(torch.float32)),
    1: (1, [2], lambda stored: stored.view(torch.float16)),
    30: (1, [2], lambda stored: stored.view(torch.bfloat16)),
    8: (32, [2, 32], decode_q8_0),
    2: (32, [2, 16], decode_q4_0),
    3: (32, [2, 2, 16], decode_q4_1),
    14: (256, [128, 64, 16, 2], decode_q6_k),
}
GGUF_UNSUPPORTED = {
    6: "Q5_0",
    7: "Q5_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    20: "IQ4_NL",
}


def read_gguf(path: Path) -> tuple[dict, Readers]:
    """Read the sizes and tensors of a GGUF file. Raises InputError.

    The sizes are first named as in a Hugging Face config.json, so that `parse_config` checks both.
    """
    file = parse_gguf(path)
    count = file.metadata.get("split.count")
    if count not in (None, 0, 1):
        raise InputError(
            f"{path} is one of {count!r:.40} parts: merge them with `llama-gguf-split --merge`"
        )
    raw = {name: file.metadata.get(key) for name, key in GGUF_CONFIG.items()}
    raw["tie_word_embeddings"] = "output.weight" not in file.tensors
    embedding = file.tensors.get("token_embd.weight")
    if embedding and embedding.shape:
        raw["vocab_size"] = embedding.shape[0]
    sizes = parse_config(raw, path)
    head_dim = sizes["head_dim"]
    if "rope_freqs.weight" in file.tensors:
        factors = read_gguf_tensor(file, "rope_freqs.weight", head_dim)
        sizes["rope_factors"] = tuple(factors.tolist())
    tensors = []
    for name in file.tensors:
        # blk.3.attn_q.weight -> layers.3.self_attn.q_proj.weight
        parts = [GGUF_NAMES.get(part, part) for part in name.split(".")]
        tensors.append((".".join(parts), partial(read_gguf_tensor, file, name, head_dim)))
    return sizes, iter(tensors)


def read_gguf_tensor(file: GGUFFile, name: str, head_dim: int) -> Tensor:
    """Read a tensor, decoded to floats. Raises InputError."""
    shape, type_id, start = file.tensors[name]
    if type_id not in GGUF_TYPES:
        type_name = GGUF_UNSUPPORTED.get(type_id, type_id)
        raise InputError(
            f"{file.path}: tensor {name} has the unsupported type {type_name}: "
            "use a Q8_0, Q4_0 or F16 file"
        )
    weights, sizes, decode = GGUF_TYPES[type_id]
    what = f"{file.path}: tensor {name} of shape {shape} is damaged"
    with input_errors(what, Exception):  # PyTorch raises many kinds
        end = start + math.prod(shape) // weights * sum(sizes)
        blocks = file.data[start:end].view(-1, sum(sizes))
        tensor = decode(*blocks.split(sizes, dim=1)).view(shape)
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            # RoPE turns pairs of rows. GGUF has the two of a pair side by side, x0 y0 x1 y1 ...,
            # and we have them half a head apart, x0 x1 ... y0 y1 ...
            pairs = tensor.unflatten(0, (-1, head_dim // 2, 2))  # (heads, D/2, 2, E)
            tensor = pairs.transpose(1, 2).flatten(0, 2)
    return tensor


def parse_gguf(path: Path) -> GGUFFile:
    """Read a GGUF file's header. Raises InputError."""
    what = f"{path}: not a GGUF file, or a damaged one"
    with input_errors(what, Exception), open(path, "rb") as opened:  # damage shows in many ways
        file = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants it writable
        magic, version, tensor_count, metadata_count = read_gguf_numbers(file, "4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError("expected version 2 or 3")
        metadata = {}
        for _ in range(metadata_count):
            key = read_gguf_value(file, GGUF_STRING)
            (type_id,) = read_gguf_numbers(file, "I")
            metadata[key] = read_gguf_value(file, type_id)
        tensors = {}
        for _ in range(tensor_count):
            name = read_gguf_value(file, GGUF_STRING)
            (dimensions,) = read_gguf_numbers(file, "I")
            shape = read_gguf_numbers(file, f"{dimensions}Q")[::-1]  # GGUF reverses them
            type_id, start = read_gguf_numbers(file, "IQ")
            tensors[name] = GGUFTensor(shape, type_id, start)
        alignment = metadata.get("general.alignment", 32)
        data_start = math.ceil(file.tell() / alignment) * alignment
        data = torch.frombuffer(file, dtype=torch.uint8)[data_start:]
        return GGUFFile(path, metadata, tensors, data)


def read_gguf_value(file: mmap.mmap, type_id: int):
    if type_id == GGUF_STRING:
        (length,) = read_gguf_numbers(file, "Q")
        return file.read(length).decode(errors="replace")
    if type_id == GGUF_ARRAY:
        item_type, count = read_gguf_numbers(file, "IQ")
        return [read_gguf_value(file, item_type) for _ in range(count)]
    (number,) = read_gguf_numbers(file, GGUF_NUMBERS[type_id])
    return number


def read_gguf_numbers(file: mmap.mmap, letters: str) -> tuple:
    """Read the next numbers, little-endian, of the types that these letters name in `struct`."""
    size = struct.calcsize("<" + letters)
    return struct.unpack("<" + letters, file.read(size))
