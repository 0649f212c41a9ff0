"""Claims about GGUF files: exactly the values they store, and what is refused."""
import contextlib
import json
import random
import re
import struct
from pathlib import Path

import pytest
import torch
from conftest import TIED, UNTIED, case_name, close, raises
from safetensors.torch import load_file
from tiny_models import LETTERS

from app.loading import load_model
from llama import Llama
from plumbing.errors import InputError
from plumbing.gguf import CONFIG_KEYS, TENSOR_NAMES, decode_q6_k, parse_gguf
from plumbing.tokenizer import load_tokenizer

TOKENS = torch.randint(0, 256, (3, 40), generator=torch.Generator().manual_seed(0))
GGUF_TYPE_IDS = {"F32": 0, "F16": 1, "BF16": 30, "Q8_0": 8, "Q4_0": 2, "Q4_1": 3}
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
GGUF_TOKENIZER = {
    "tokenizer.ggml.tokens": ["a", "<|eot_id|>"],
    "tokenizer.ggml.token_type": [1, 3],
    "tokenizer.ggml.merges": [],
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.eos_token_id": 0,
}
both = pytest.mark.parametrize("folder", [UNTIED, TIED], ids=lambda path: path.name)


def quantize(x: torch.Tensor, kind: str) -> tuple[bytes, torch.Tensor]:
    """Return x in a GGUF type: its bytes, and the values that the bytes stand for."""
    if kind in FLOATS:
        stored = x.to(FLOATS[kind])
        return stored.contiguous().view(torch.uint8).numpy().tobytes(), stored.float()
    blocks = x.reshape(-1, 32)
    first, last = {"Q8_0": (-127, 127), "Q4_0": (-8, 7), "Q4_1": (0, 15)}[kind]
    low, high = blocks.aminmax(dim=1, keepdim=True)
    if kind != "Q4_1":  # a range around 0, without a minimum
        high = 2 * torch.maximum(-low, high)
        low = torch.zeros_like(low)
    scale = ((high - low) / (last - first)).half()
    minimum = low.half()
    q = ((blocks - minimum.float()) / scale.float()).round().clamp(first, last)
    values = (scale.float() * q + minimum.float()).view(x.shape)
    parts = [scale.view(torch.uint8)]
    if kind == "Q4_1":
        parts.append(minimum.view(torch.uint8))
    if kind == "Q8_0":
        parts.append(q.to(torch.int8).view(torch.uint8))
    else:
        from_zero = (q + 8 if kind == "Q4_0" else q).to(torch.uint8)
        parts.append(from_zero[:, :16] | from_zero[:, 16:] << 4)
    return torch.cat(parts, dim=1).numpy().tobytes(), values


def gguf_value(value: str | float | int | list) -> tuple[int, bytes]:
    """Return the type id and the bytes of a value of the metadata."""
    if isinstance(value, list):
        items = [gguf_value(item) for item in value]
        item_types = [type_id for type_id, _ in items] or [8]
        data = b"".join(raw for _, raw in items)
        return 9, struct.pack("<IQ", item_types[0], len(items)) + data
    if isinstance(value, str):
        return 8, struct.pack("<Q", len(value.encode())) + value.encode()
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    return 4, struct.pack("<I", value)


def gguf_string(text: str) -> bytes:
    _, raw = gguf_value(text)
    return raw


Stored = tuple[int, tuple[int, ...], bytes]  # a tensor: type id, shape, bytes


def write_gguf(path: Path, metadata: dict, tensors: dict[str, Stored]) -> Path:
    """Write a GGUF file, version 3: header, key-values, table of tensors, data aligned to 32."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        type_id, raw = gguf_value(value)
        header += gguf_string(key) + struct.pack("<I", type_id) + raw
    data = b""
    for name, (type_id, shape, raw) in tensors.items():
        header += gguf_string(name) + struct.pack("<I", len(shape))
        header += struct.pack(f"<{len(shape)}QIQ", *reversed(shape), type_id, len(data))
        data += raw + bytes(-len(raw) % 32)
    path.write_bytes(header + bytes(-len(header) % 32) + data)
    return path


def convert(folder: Path, path: Path, kind: str = "F32", changes: dict = {}) -> Llama:
    """Write a folder as GGUF, with these changes of metadata and tensors (None removes one).

    Return the model whose weights are the values that the file stands for.
    """
    raw = json.loads((folder / "config.json").read_text())
    model = load_model(folder)
    entries = {theirs: raw.get(ours) for ours, theirs in CONFIG_KEYS.items()}
    if model.config.rope_factors:
        factors = torch.tensor(model.config.rope_factors)
        entries["rope_freqs.weight"] = (0, tuple(factors.shape), factors.numpy().tobytes())
    for name, weight in model.named_parameters():  # a tied head is not among them
        gguf_name = name
        for theirs, ours in TENSOR_NAMES.items():
            gguf_name = re.sub(rf"\b{ours}\b", theirs, gguf_name)
        rows = weight
        if "q_proj" in name or "k_proj" in name:  # the two halves of a head, interleaved
            halves = weight.unflatten(0, (-1, 2, raw["head_dim"] // 2))
            rows = halves.transpose(1, 2).flatten(0, 2)
        stored_as = kind if weight.ndim == 2 else "F32"
        stored, _ = quantize(rows, stored_as)
        _, values = quantize(weight, stored_as)
        entries[gguf_name] = (GGUF_TYPE_IDS[stored_as], tuple(weight.shape), stored)
        weight.copy_(values)
    entries |= changes
    present = {key: value for key, value in entries.items() if value is not None}
    tensors = {key: value for key, value in present.items() if isinstance(value, tuple)}
    metadata = {key: value for key, value in present.items() if key not in tensors}
    write_gguf(path, metadata, tensors)
    return model


@pytest.mark.parametrize("kind", GGUF_TYPE_IDS)
@both
def test_a_gguf_file_means_exactly_the_values_it_stores(tmp_path, folder, kind):
    expected = convert(folder, tmp_path / "tiny.gguf", kind)
    loaded = load_model(tmp_path / "tiny.gguf")
    assert (loaded.lm_head.weight is loaded.embed_tokens.weight) == (folder == TIED)
    close(loaded(TOKENS), expected(TOKENS), 1e-5)
    if kind == "F32":
        golden = load_file(folder / "expected.safetensors")
        close(loaded(golden["input_ids"]), golden["logits"])


def test_a_weight_of_q6_k_is_put_together_from_its_four_and_its_two_bits():
    generator = random.Random(0)
    blocks = []
    expected = []
    for _ in range(3):
        low = generator.randbytes(128)
        high = generator.randbytes(64)
        scales = [generator.randrange(-128, 128) for _ in range(16)]
        blocks.append(low + high + struct.pack("<16be", *scales, 0.25))
        for i in range(256):
            half, within = divmod(i, 128)  # each half has 64 bytes of `low` and 32 of `high`
            four = low[64 * half + within % 64] >> 4 * (within // 64) & 15
            two = high[32 * half + within % 32] >> 2 * (within // 32) & 3
            expected.append((four + 16 * two - 32) * scales[i // 16] * 0.25)
    stored = torch.frombuffer(bytearray(b"".join(blocks)), dtype=torch.uint8).view(3, 210)
    weights = decode_q6_k(*stored.split([128, 64, 16, 2], dim=1))
    assert weights.flatten().tolist() == expected


@pytest.mark.parametrize("changes, culprit", [
    ({"general.architecture": "qwen2"}, "'qwen2', but only Llama's"),
    ({"llama.block_count": None}, "num_hidden_layers"),
    ({"llama.rope.scaling.type": "yarn"}, "'yarn'"),
    ({"llama.rope.scaling.factor": 2.0}, "no rope_type"),
    ({"llama.attention.head_count": "x"}, "num_attention_heads"),
    ({"general.alignment": "x"}, "tiny.gguf"),
    ({"blk.2.ffn_up.weight": None}, "mlp.up_proj.weight missing"),
    ({"blk.0.attn_q.bias": (0, (64,), bytes(256))}, "layers.0.self_attn.q_proj.bias"),
    ({"output_norm.weight": (0, (32,), bytes(128))}, "(32,)"),
    ({"token_embd.weight": (0, (), bytes(4))}, "tiny.gguf"),
    ({"token_embd.weight": None}, "vocab_size"),
    ({"blk.0.attn_q.weight": (0, (), bytes(4))}, "attn_q.weight of type F32 and shape () is"),
    ({"rope_freqs.weight": (0, (3,), bytes(12))}, "tiny.gguf"),
    ({"blk.1.attn_k.weight": (0, (31, 64), bytes(31 * 256))}, "tiny.gguf"),
    ({"blk.0.ffn_up.weight": (2, (0, 64), b"")}, "layers.0.mlp.up_proj.weight"),
    ({"output_norm.weight": (2, (48,), bytes(36))}, "output_norm.weight"),  # a block and a half
    ({"blk.0.ffn_up.weight": (12, (160, 64), b"")},
     "blk.0.ffn_up.weight has the unsupported type Q4_K: use a file that has only the types F32, "),
    ({"blk.0.ffn_up.weight": (99, (160, 64), b"")}, "unsupported type 99"),
], ids=case_name)
def test_a_broken_gguf_file_is_an_input_error_that_names_the_culprit(tmp_path, changes, culprit):
    convert(UNTIED, tmp_path / "tiny.gguf", changes=changes)
    raises(culprit, load_model, tmp_path / "tiny.gguf")


def test_a_gguf_file_may_say_none_where_rope_is_not_scaled(tmp_path):
    unscaled = {"llama.rope.scaling.type": "none"}
    convert(UNTIED, tmp_path / "tiny.gguf", changes=unscaled)
    assert load_model(tmp_path / "tiny.gguf").config.rope_factors is None


def test_layers_that_are_not_wanted_are_not_even_read(tmp_path):
    unreadable = {"blk.0.ffn_up.weight": (12, (160, 64), b"")}
    convert(UNTIED, tmp_path / "tiny.gguf", changes=unreadable)
    raises("Q4_K", load_model, tmp_path / "tiny.gguf", "cpu", torch.float32, 3)
    assert load_model(tmp_path / "tiny.gguf", last=2).config.num_hidden_layers == 3


def test_a_truncated_or_changed_gguf_file_is_an_input_error_or_loads(tmp_path):
    file = tmp_path / "tiny.gguf"
    convert(UNTIED, file)
    original = file.read_bytes()

    def load(content: bytes) -> None:
        file.write_bytes(content)
        parse_gguf.cache_clear()
        load_model(file)

    for length in [*range(0, 2000, 41), 10_000, len(original) // 2, len(original) - 300]:
        raises("tiny.gguf", load, original[:length])
    draw = random.Random(0)
    refused = 100
    for _ in range(100):
        changed = bytearray(original)
        for _ in range(draw.randint(1, 4)):
            changed[draw.randrange(4, 2000)] = draw.randrange(256)
        with contextlib.suppress(InputError):
            load(changed)
            refused -= 1
    assert 30 < refused < 100  # neither all nor nearly none


# --- Tokenizers of GGUF files ---


@pytest.mark.parametrize("kind, pieces", [
    ("llama-bpe", ["12", "3", "45", "6", "78"]),  # "78" is a token without a merge
    ("smollm", list("12345678")),
])
def test_a_gguf_file_states_how_text_is_split_before_merging(tmp_path, kind, pieces):
    tokens = LETTERS + ["12", "34", "1234", "45", "78", "<|im_end|>", "<tool>"]
    control = tokens.index("<|im_end|>")
    tool = tokens.index("<tool>")
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 4],
        "tokenizer.ggml.merges": ["1 2", "3 4", "12 34", "4 5"],
        "tokenizer.ggml.pre": kind,
        "tokenizer.ggml.eos_token_id": control,
    }
    tokenizer = load_tokenizer(write_gguf(tmp_path / "tiny.gguf", metadata, {}))
    assert [tokens[i] for i in tokenizer.encode("12345678")] == pieces
    assert control not in tokenizer.encode("<|im_end|>")
    assert tokenizer.stop_ids == {control}
    assert tokenizer.encode("<tool>") == [tool]  # text that is one token, and is shown
    assert tokenizer.decode([tool, control]) == "<tool>"


def test_what_ends_a_turn_stops_even_if_a_gguf_file_states_only_the_base_models_stop_id(tmp_path):
    template = {"tokenizer.chat_template": "{{ messages[-1].content }}<|eot_id|>"}
    tokenizer = load_tokenizer(write_gguf(tmp_path / "a.gguf", GGUF_TOKENIZER | template, {}))
    assert tokenizer.stop_ids == {0, 1}


@pytest.mark.parametrize("value", [[[1]], "x", 0.5], ids=str)
@pytest.mark.parametrize("key", GGUF_TOKENIZER)
def test_gguf_metadata_of_the_wrong_kind_is_an_input_error(tmp_path, key, value):
    file = write_gguf(tmp_path / "b.gguf", GGUF_TOKENIZER | {key: value}, {})
    raises("b.gguf", load_tokenizer, file)
