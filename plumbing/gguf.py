"""GGUF, the file format of llama.cpp: sizes, a tokenizer and tensors in one file, little-endian.

app/loading.py reads a model from such a file with `read_gguf`, plumbing/tokenizer.py its tokenizer
with `parse_gguf`. The sections go from the model down to the bytes. A file is

    "GGUF", version, number of tensors, number of metadata entries
    metadata    each entry: key (a string), type id, value
    tensors     each tensor: name, number of dimensions, dimensions, type id, offset of its data
    padding     up to a multiple of the alignment
    data

A string is its length and its bytes. An array is the type id of its items, their number, and the
items. Quantized types store weights in blocks. Three types have blocks of 32 weights, with float16
scales:

    Q8_0    scale, 32 signed bytes           weight = byte * scale
    Q4_0    scale, 32 half bytes             weight = (half byte - 8) * scale
    Q4_1    scale, minimum, 32 half bytes    weight = half byte * scale + minimum

One type has blocks of 256 weights, in 16 groups of 16. llama.cpp uses it for the LM head of Q4_0
files:

    Q6_K    256 low 4 bits, 256 high 2 bits, 16 group scales (signed bytes), scale
            weight = (low + 16 * high - 32) * group scale * scale

All weights are decoded to floats when they are loaded, because nothing in this repository
multiplies quantized weights. The weights therefore take more space in memory than in the file: in
float32 about 4 times as much for Q8_0 and 7 times for Q4_0, in bfloat16 half of that.
"""
from __future__ import annotations

import math
import mmap
import struct
from functools import lru_cache, partial
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

import torch
from torch import Tensor

from plumbing.errors import InputError, input_errors
from plumbing.huggingface import ReadTensors, parse_config

CONFIG_KEYS = {  # the name in a config.json: the key in a GGUF file
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
    "max_position_embeddings": "llama.context_length",
}
TENSOR_NAMES = {  # parts of tensor names: in a GGUF file, and in llama.py
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

# --- A model ---


class StoredTensor(NamedTuple):
    """Where a tensor lies in a GGUF file."""

    shape: tuple[int, ...]
    type_id: int
    start: int  # the offset in the data of the file, in bytes


class GGUFFile(NamedTuple):
    """What a GGUF file holds."""

    path: Path
    metadata: dict
    tensors: dict[str, StoredTensor]
    data: Tensor  # bytes, memory-mapped


def read_gguf(path: Path) -> tuple[dict, ReadTensors]:
    """Return the sizes of the model in a GGUF file, and a function that yields its tensors. Raises
    InputError."""
    file = parse_gguf(path)
    # The names are those of a config.json, so that `parse_config` checks the sizes of both formats.
    config = {name: file.metadata.get(key) for name, key in CONFIG_KEYS.items()}
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    if config["rope_type"] == "none":  # llama.cpp's word for "default"
        config["rope_type"] = "default"
    embedding = file.tensors.get("token_embd.weight")
    if embedding and embedding.shape:
        config["vocab_size"] = embedding.shape[0]
    sizes = parse_config(config, path)
    head_dim = sizes["head_dim"]
    if file.metadata.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise InputError(f"{path}: RoPE over a part of each head is not supported")
    if "rope_freqs.weight" in file.tensors:
        factors = read_tensor(file, "rope_freqs.weight", head_dim)
        sizes["rope_factors"] = tuple(factors.tolist())
    return sizes, partial(read_gguf_tensors, file, head_dim)


def read_gguf_tensors(
    file: GGUFFile, head_dim: int, skipped: tuple[str, ...] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for the tensors of a GGUF file, with the names that llama.py uses.

    Tensors whose names begin with one of `skipped` are left out. Raises InputError.
    """
    for name in file.tensors:
        # blk.3.attn_q.weight -> layers.3.self_attn.q_proj.weight
        parts = [TENSOR_NAMES.get(part, part) for part in name.split(".")]
        renamed = ".".join(parts)
        if not renamed.startswith(skipped):
            yield renamed, read_tensor(file, name, head_dim)


def read_tensor(file: GGUFFile, name: str, head_dim: int) -> Tensor:
    """Return the tensor that has this name in the file, decoded to floats. Raises InputError."""
    shape, type_id, start = file.tensors[name]
    if type_id not in BLOCK_TYPES:
        type_name = UNSUPPORTED_TYPES.get(type_id, type_id)
        supported = ", ".join(block.name for block in BLOCK_TYPES.values())
        raise InputError(
            f"{file.path}: tensor {name} has the unsupported type {type_name}: use a file that has "
            f"only the types {supported}"
        )
    block = BLOCK_TYPES[type_id]
    block_bytes = sum(block.part_bytes)
    what = f"{file.path}: tensor {name} of type {block.name} and shape {shape} is damaged"
    with input_errors(what, RuntimeError, TypeError):  # PyTorch raises both for a wrong shape
        end = start + math.prod(shape) // block.weights * block_bytes
        blocks = file.data[start:end].view(-1, block_bytes)
        tensor = block.decode(*blocks.split(block.part_bytes, dim=1)).view(shape)
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            # RoPE rotates pairs of rows, x and y. In GGUF the two are neighbors: x0 y0 x1 y1 ...
            # In llama.py they are half a head apart: x0 x1 ... y0 y1 ...
            pairs = tensor.unflatten(0, (-1, head_dim // 2, 2))  # (heads, D/2, 2, E)
            tensor = pairs.transpose(1, 2).flatten(0, 2)  # (heads * D, E)
    return tensor


# --- The types of tensors ---


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Split bytes into numbers of 2 or 4 bits: first the lowest bits of all bytes, then the next
    ones. (..., bytes) -> (..., bytes * 8 / bits)."""
    mask = 2**bits - 1
    parts = [(packed >> shift) & mask for shift in range(0, 8, bits)]
    return torch.cat(parts, dim=-1).float()


def decode_q8_0(scale: Tensor, signed: Tensor) -> Tensor:
    return signed.view(torch.int8).float() * scale.view(torch.float16)


def decode_q4_0(scale: Tensor, packed: Tensor) -> Tensor:
    return (unpack(packed, bits=4) - 8) * scale.view(torch.float16)


def decode_q4_1(scale: Tensor, minimum: Tensor, packed: Tensor) -> Tensor:
    return unpack(packed, bits=4) * scale.view(torch.float16) + minimum.view(torch.float16)


def decode_q6_k(low_bits: Tensor, high_bits: Tensor, scales: Tensor, block_scale: Tensor) -> Tensor:
    """Decode blocks of 256 weights of 6 bits. The bits of a block come in two halves:

        low 4 bits     64 bytes of weights 0 to 127, then 64 of weights 128 to 255
        high 2 bits    32 bytes of weights 0 to 127, then 32 of weights 128 to 255
    """
    low = unpack(low_bits.unflatten(1, (2, 64)), bits=4)  # (n, 2, 128)
    high = unpack(high_bits.unflatten(1, (2, 32)), bits=2)  # (n, 2, 128)
    weights = (low + 16 * high - 32).view(-1, 16, 16)  # (n, groups, 16)
    group_scales = scales.view(torch.int8).float() * block_scale.view(torch.float16)  # (n, 16)
    return weights * group_scales.unsqueeze(-1)


class BlockType(NamedTuple):
    """How a type stores the weights of one block.

    decode: turns the parts of n blocks, each (n, bytes), into the weights of these blocks.
    """

    name: str
    weights: int  # in a block
    part_bytes: list[int]  # the size of each part of a block
    decode: Callable[..., Tensor]


BLOCK_TYPES = {  # by type id
    0: BlockType("F32", 1, [4], lambda stored: stored.view(torch.float32)),
    1: BlockType("F16", 1, [2], lambda stored: stored.view(torch.float16)),
    2: BlockType("Q4_0", 32, [2, 16], decode_q4_0),
    3: BlockType("Q4_1", 32, [2, 2, 16], decode_q4_1),
    8: BlockType("Q8_0", 32, [2, 32], decode_q8_0),
    14: BlockType("Q6_K", 256, [128, 64, 16, 2], decode_q6_k),
    30: BlockType("BF16", 1, [2], lambda stored: stored.view(torch.bfloat16)),
}
UNSUPPORTED_TYPES = {  # by type id, for the error message
    6: "Q5_0",
    7: "Q5_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    20: "IQ4_NL",
}

# --- The file ---

# By type id: the letter of a number's type in `struct`.
NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
STRING = 8  # (type ids, too)
ARRAY = 9


@lru_cache(maxsize=1)  # the model and its tokenizer are read one after the other
def parse_gguf(path: Path) -> GGUFFile:
    """Read the header of a GGUF file, and map its data into memory. Raises InputError."""
    what = f"{path}: not a GGUF file, or a damaged one"
    # Damage shows in many ways, such as a file that ends too early (struct.error), an impossible
    # length (OverflowError) or arrays within arrays without end (RecursionError).
    with input_errors(what, Exception), open(path, "rb") as opened:
        file = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants it writable
        magic, version, tensor_count, metadata_count = read_numbers(file, "4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError("expected version 2 or 3")
        metadata = {}
        for _ in range(metadata_count):
            key = read_value(file, STRING)
            (type_id,) = read_numbers(file, "I")
            metadata[key] = read_value(file, type_id)
        tensors = {}
        for _ in range(tensor_count):
            name = read_value(file, STRING)
            (dimensions,) = read_numbers(file, "I")
            shape = read_numbers(file, f"{dimensions}Q")[::-1]  # out of GGUF's reverse order
            type_id, start = read_numbers(file, "IQ")
            tensors[name] = StoredTensor(shape, type_id, start)
        alignment = metadata.get("general.alignment", 32)
        padding = -file.tell() % alignment
        data = torch.frombuffer(file, dtype=torch.uint8)[file.tell() + padding:]
        return GGUFFile(path, metadata, tensors, data)


def read_value(file: mmap.mmap, type_id: int) -> str | int | float | bool | list:
    """Read the next value, which is of this type. Raises ValueError if there is no such type."""
    if type_id == STRING:
        (length,) = read_numbers(file, "Q")
        return file.read(length).decode(errors="replace")
    if type_id == ARRAY:
        item_type, count = read_numbers(file, "IQ")
        return [read_value(file, item_type) for _ in range(count)]
    if type_id not in NUMBERS:
        raise ValueError(f"unknown type id {type_id}")
    (number,) = read_numbers(file, NUMBERS[type_id])
    return number


def read_numbers(file: mmap.mmap, letters: str) -> tuple:
    """Read the next numbers, little-endian, of the types that these letters name in `struct`."""
    size = struct.calcsize("<" + letters)
    return struct.unpack("<" + letters, file.read(size))
