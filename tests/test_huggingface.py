"""Claims about model folders: what a config and tensors may say, and what is refused."""
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import TIED, UNTIED, case_name, close, raises
from safetensors.torch import load_file, save_file
from tiny_models import SIX_BITS

from app.loading import load_model
from llama import Config, Llama
from plumbing.errors import InputError
from plumbing.files import read_json
from plumbing.huggingface import load_weights, parse_config, read_hugging_face

SCALING = json.loads((TIED / "config.json").read_text())["rope_scaling"]
K = "layers.1.self_attn.k_proj.weight"
NORM = "norm.weight"
WEIGHTS = "model.safetensors"


def change_config(folder: Path, changes: dict) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_what_a_config_leaves_out_has_hugging_faces_defaults():
    defaults = {
        "num_key_value_heads": 4,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "max_position_embeddings": 2048,
    }
    raw = read_json(TIED / "config.json") | dict.fromkeys(defaults)
    config = parse_config(raw, TIED)
    assert {name: config[name] for name in defaults} == defaults


def test_rope_parameters_are_read_where_newer_files_state_them():
    raw = read_json(TIED / "config.json")
    newer = dict(raw)
    newer["rope_parameters"] = newer.pop("rope_scaling") | {"rope_theta": newer.pop("rope_theta")}
    assert parse_config(newer, TIED) == parse_config(raw, TIED)


@pytest.mark.parametrize("changes", [
    {"rope_parameters": None},
    {"rope_parameters": {"rope_theta": None}},
    {"rope_parameters": SCALING},
    {"rope_scaling": {**SCALING, "type": "llama3"}},
    {"rope_scaling": {"type": "llama3"}, "rope_parameters": {**SCALING, "rope_type": None}},
], ids=case_name)
def test_settings_of_rope_that_are_left_out_in_one_place_are_read_in_another(changes):
    raw = read_json(TIED / "config.json")
    assert parse_config(raw | changes, TIED) == parse_config(raw, TIED)


@pytest.mark.parametrize("changes, culprit", [
    ({"rope_parameters": {"rope_type": "linear"}}, "rope_type is 'linear', but only Llama's"),
    ({"rope_scaling": {"factor": 2.0}}, "no rope_type"),
    ({"rope_scaling": {**SCALING, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
], ids=case_name)
def test_settings_of_rope_that_cannot_be_used_are_an_input_error(changes, culprit):
    raises(culprit, parse_config, read_json(TIED / "config.json") | changes, TIED)


@pytest.mark.parametrize("changes, culprit", [
    ({"model_type": "mamba"}, "model_type is 'mamba', but only Llama's"),
    ({"attention_bias": True}, "attention_bias is True, but only Llama's"),
    ({"hidden_act": "gelu"}, "'gelu'"),
    ({"rope_scaling": {"type": "yarn"}}, "rope_type is 'yarn', but only Llama's"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "'linear'"),
    ({"rope_scaling": "llama3"}, "rope_scaling"),
    ({"rope_scaling": SCALING | {"low_freq_factor": None}}, "low_freq_factor"),
    ({"rope_scaling": SCALING | {"factor": 10**400}}, "factor"),
    ({"hidden_size": None}, "hidden_size"),
    ({"num_key_value_heads": "2"}, "num_key_value_heads"),
    ({"num_key_value_heads": 3}, "3 kv heads"),
    ({"num_hidden_layers": 10**9}, "1000000000"),
    ({"max_position_embeddings": 10**8}, "100000000"),
    ({"vocab_size": 2**60}, "model"),
    ({"head_dim": 2**31}, "2147483648"),
    ({"head_dim": -8}, "head_dim"),
    ({"head_dim": 15}, "head size 15"),
    ({"rms_norm_eps": "x"}, "rms_norm_eps"),
    ({"rope_theta": 0}, "theta"),
    ({"tie_word_embeddings": 1}, "lm_head"),
], ids=case_name)
def test_a_config_that_cannot_be_used_is_an_input_error_that_names_the_value(
        copy, changes, culprit):
    change_config(copy, changes)
    raises(culprit, load_model, copy)
    raises(str(copy), load_model, copy)


@pytest.mark.parametrize("tensor, value, culprit", [
    (K, None, f"{K} missing"),
    (K, torch.zeros(32, 63), "(32, 63)"),
    (K, torch.zeros(32, 64).to(torch.float8_e4m3fn), "float8_e4m3fn"),
    ("layers.0.self_attn.q_proj.bias", torch.zeros(64), "only the weights of a Llama"),
    (NORM, torch.full((64,), math.nan), NORM),
    (NORM, torch.full((64,), 1e6), "float16"),
], ids=case_name)
def test_a_tensor_that_cannot_be_used_is_an_input_error_that_names_it(
        copy, tensor, value, culprit):
    tensors = load_file(copy / WEIGHTS)
    tensors.pop(f"model.{tensor}", None)
    if value is not None:
        tensors[f"model.{tensor}"] = value
    save_file(tensors, copy / WEIGHTS)
    raises(culprit, load_model, copy, "cpu", torch.float16)


@pytest.mark.parametrize("file, damage", [
    ("config.json", Path.unlink),
    ("config.json", lambda path: path.write_text('{"a":' * 100_000)),
    ("config.json", lambda path: os.truncate(path, 400)),
    ("config.json", lambda path: path.write_text("[]")),
    (WEIGHTS, Path.unlink),
    (WEIGHTS, lambda path: os.truncate(path, 1000)),
    (WEIGHTS, lambda path: os.truncate(path, 600_000)),
    (".", lambda path: (path / WEIGHTS).write_bytes(SIX_BITS)),
])
def test_a_damaged_or_missing_file_is_an_input_error_that_names_it(copy, file, damage):
    damage(copy / file)
    raises(str(copy / file), load_model, copy)


def test_a_folder_with_only_pytorch_model_bin_is_told_to_be_converted(copy):
    torch.save({}, copy / "pytorch_model.bin")
    assert load_model(copy).config.hidden_size == 64  # beside safetensors it does not matter
    (copy / WEIGHTS).unlink()
    raises("only pytorch_model.bin, convert it to safetensors", load_model, copy)


def test_a_missing_or_damaged_shard_is_an_input_error_that_names_it_or_what_it_held(tmp_path):
    folder = shutil.copytree(UNTIED, tmp_path / "model")
    last = folder / "model-00004-of-00004.safetensors"
    held = load_file(last)
    os.truncate(last, 20_000)
    raises(last.name, load_model, folder)
    last.unlink()
    with pytest.raises(InputError, match="missing") as caught:
        load_model(folder)
    assert any(name.removeprefix("model.") in str(caught.value) for name in held)


@pytest.mark.parametrize("factor, is_copy", [(1.0, True), (2.0, False)])
def test_a_head_of_its_own_is_used_even_if_the_config_says_that_it_is_tied(copy, factor, is_copy):
    expected = load_model(copy)
    tensors = load_file(copy / WEIGHTS)
    tensors["lm_head.weight"] = factor * tensors["model.embed_tokens.weight"]
    save_file(tensors, copy / WEIGHTS)
    tokens = torch.tensor([[1, 2, 3]])
    logits = load_model(copy)(tokens)
    close(logits, factor * expected(tokens))
    assert is_copy == torch.allclose(logits, expected(tokens))


def test_a_bfloat16_checkpoint_is_loaded_without_a_float32_copy(copy):
    halves = {name: weight.bfloat16() for name, weight in load_file(copy / WEIGHTS).items()}
    save_file(halves, copy / WEIGHTS)
    sizes, read_tensors = read_hugging_face(copy)
    read = dict(read_tensors())
    with torch.device("meta"):
        model = Llama(Config(**sizes))
    expected = dict(model.named_parameters())
    loaded = load_weights(expected, iter(read.items()), copy, "cpu", torch.bfloat16)
    assert set(loaded) == set(expected)
    for name, weight in loaded.items():
        assert weight.data_ptr() == read[name].data_ptr() != 0
