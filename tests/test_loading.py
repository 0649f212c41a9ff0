"""Claims about checkpoints: what is saved comes back, what does not fit is refused in one line, and
checks come before the target's weights are read."""
import json
import math
import os
import stat
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, UNTIED, close, raises
from safetensors.torch import load_file, save_file
from tiny_models import LLAMA3, SIX_BITS, byte_tokenizer, new_drafter, new_target

from app import loading
from app.loading import (
    find_drafter,
    fingerprints,
    load_drafter,
    load_model,
    load_models,
    load_target,
    load_target_alone,
    save_drafter,
)
from app.packed import pack_models
from llama import Llama, Sampling
from moa import DraftLimits, DraftState
from plumbing.errors import InputError
from plumbing.hub import SHIPPED_DRAFTERS
from train import drafter_pass

VOCABULARY = 20


@pytest.fixture(scope="module")
def target() -> Llama:
    return new_target(VOCABULARY)


@pytest.fixture
def saved(target, tmp_path):
    """A drafter's folder to spoil."""
    save_drafter(new_drafter(target), tmp_path)
    return tmp_path


def change_config(folder, **changes) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refused(folder, target: Llama, complaint: str) -> None:
    """Loading ends in one line that names the folder and what is wrong."""
    with pytest.raises(InputError) as error:
        load_drafter(folder, target)
    message = str(error.value)
    assert complaint in message and str(folder) in message and "\n" not in message


# --- The target ---


def test_a_model_without_its_first_layers_computes_the_others():
    whole = load_model(UNTIED)
    last = load_model(UNTIED, last=1)
    assert list(last.layers)[:2] == [None, None]
    calls = []
    whole.layers[2].register_forward_hook(
        lambda layer, args, kwargs, output: calls.append((args, kwargs, output)), with_kwargs=True
    )
    logits = whole(torch.tensor([[3, 1, 4]]))
    ((args, kwargs, output),) = calls
    close(last.layers[2](*args, **kwargs), output)
    close(last.lm_head(last.norm(output)), logits)


def test_a_tokenizer_with_more_tokens_than_the_model_is_an_input_error(copy):
    byte_tokenizer(copy, LLAMA3)
    raises("the model's 256 embeddings", load_target, copy, "cpu", torch.float32)


def test_a_model_that_is_not_exact_says_so_once(chat_model, capsys):
    load_target_alone(str(chat_model), "cpu", torch.float16)
    line = "float16 is slow on a CPU, and not exact (use bfloat16 or float32): with drafts, texts"
    err = capsys.readouterr().err
    assert err.startswith(line) and err.count("\n") == 1


# --- What is saved comes back ---


@pytest.mark.parametrize("choices", [
    {},
    {"target_layer_inference": 2},
    {"draft_vocabulary": (1, 2, 19)},
    {"layer_self_attention_num_attention_heads": 4},
], ids=str)
def test_a_saved_drafter_comes_back_as_it_was(target, tmp_path, choices):
    drafter = new_drafter(target, **choices)
    folder = tmp_path / "drafter"
    save_drafter(drafter, folder, torch.float32)
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert set(load_file(folder / "model.safetensors")) == set(drafter.trained_parameters())
    loaded = load_drafter(folder, target)
    assert loaded.config == drafter.config
    tokens = torch.arange(9).unsqueeze(0)
    cache = target.new_cache(9)
    target.hidden(tokens, cache)
    inputs = tokens, cache.by_token(0, 9), torch.arange(9).clamp(max=3).unsqueeze(0)
    for ours, theirs in zip(drafter_pass(loaded, *inputs), drafter_pass(drafter, *inputs)):
        close(loaded.distributions(ours, Sampling()), drafter.distributions(theirs, Sampling()))


def test_a_config_may_leave_the_sizes_out(target, tmp_path):
    drafter = new_drafter(
        target,
        self_attention_num_key_value_heads=2,
        cross_attention_num_key_value_heads=1,
        layer_self_attention_intermediate_size=7,
        self_attention_intermediate_size=9,
    )
    save_drafter(drafter, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert load_drafter(tmp_path, target).config == drafter.config


def test_a_save_that_fails_leaves_the_old_checkpoint_complete(target, saved, monkeypatch):
    old = {file.name: file.read_bytes() for file in saved.iterdir()}
    monkeypatch.setattr(loading, "save_file", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_drafter(new_drafter(target, target_layer_inference=2), saved)
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == old


def test_files_have_the_permissions_that_the_user_asked_for(target, tmp_path):
    old = os.umask(0o027)
    try:
        save_drafter(new_drafter(target), tmp_path / "drafter")
    finally:
        os.umask(old)
    for file in (tmp_path / "drafter").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_a_packed_drafter_is_not_saved(tmp_path):
    target = new_target(VOCABULARY)
    drafter = new_drafter(target)
    pack_models(target, [drafter])
    with pytest.raises(RuntimeError, match="packed weights cannot be saved"):
        save_drafter(drafter, tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()


# --- What is missing, damaged or does not fit is refused ---


@pytest.mark.parametrize("file, content, complaint", [
    ("config.json", None, "(config.json is missing)"),
    ("config.json", b"{", "cannot be read as JSON"),
    ("model.safetensors", None, "(model.safetensors is missing)"),
    ("model.safetensors", b"?", "not a safetensors file"),
    ("model.safetensors", SIX_BITS, "F6_E2M3"),  # a type that PyTorch lacks
])
def test_a_missing_or_damaged_file_is_refused(target, saved, file, content, complaint):
    (saved / file).unlink()
    if content is not None:
        (saved / file).write_bytes(content)
    refused(saved, target, complaint)


@pytest.mark.parametrize("name, tensor, complaint", [
    ("Ekv2E.bias", None, "Ekv2E.bias missing"),
    ("Ekv2E.bias", torch.ones(3), "expected floats (16,)"),
    ("more", torch.ones(3), "tensor more is unknown"),
])
def test_a_tensor_that_does_not_fit_is_refused(target, saved, name, tensor, complaint):
    tensors = load_file(saved / "model.safetensors")
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, saved / "model.safetensors")
    refused(saved, target, complaint)


@pytest.mark.parametrize("name, value", [
    ("target_layer_inference", 5),
    ("target_layer_inference", -1),
    ("target_layer_inference", 0.5),
    ("num_attention_heads", 0),
    ("num_attention_heads", "four"),
    ("num_attention_heads", 64),
    ("layer_self_attention_num_attention_heads", 0),
    ("layer_self_attention_num_attention_heads", 17),
    ("rope_theta", []),
    ("rope_theta", 0),
    ("rms_norm_eps", math.inf),
    ("draft_vocabulary", [VOCABULARY]),
    ("draft_vocabulary", [-1]),
    ("draft_vocabulary", []),
    ("draft_vocabulary", [3, 3]),
    ("draft_vocabulary", "all"),
    ("self_attention_intermediate_size", 999),  # other than the tensors'
    ("cross_attention_num_key_value_heads", 2),
    ("layer_self_attention_intermediate_size", 999),
    ("layer_self_attention_num_key_value_heads", 2),
], ids=str)
def test_a_config_that_cannot_be_used_is_refused(target, saved, name, value):
    change_config(saved, **{name: value})
    refused(saved, target, "")


@pytest.mark.parametrize("size, value", [
    ("vocab_size", 40), ("hidden_size", 64), ("num_hidden_layers", 3), ("num_key_value_heads", 2),
])
def test_a_drafter_of_another_model_is_refused_and_the_message_names_its_own(
        target, tmp_path, size, value):
    other = Llama(replace(target.config, **{size: value}))
    vocabulary = (value - 1,) if size == "vocab_size" else None  # unknown to the target
    drafter = new_drafter(other, draft_vocabulary=vocabulary)
    save_drafter(drafter, tmp_path, target_name="its-own")
    refused(tmp_path, target, "belongs to another model")
    refused(tmp_path, target, "--model its-own")
    assert load_drafter(tmp_path, other).config == drafter.config


def test_every_shipped_drafter_names_its_target():
    for model, folder in SHIPPED_DRAFTERS.items():
        stated = json.loads((folder / "config.json").read_text())
        assert SHIPPED_DRAFTERS[stated["target_model"]] == folder


# --- Models that are ready to answer ---


def test_without_a_shipped_drafter_the_message_says_how_to_get_one_or_what_is_no_model(checkpoint):
    for model, complaint in (
        (checkpoint[1], "no drafter is shipped for .*: train one"),
        ("OWNER/BIG", "OWNER/BIG is no folder here and cannot be fetched"),  # the hub is offline
        ("smolm2", "no such model"),
        (str(ROOT / "tests"), "config.json: no such file"),
        (str(ROOT / "weights/smollm2"), "is a drafter, not a target"),
    ):
        with pytest.raises(InputError, match=complaint):
            load_models(model, None, "cpu", torch.float32)


def test_a_drafter_is_checked_before_the_targets_weights_are_read(checkpoint, monkeypatch):
    monkeypatch.setattr(loading, "load_target", lambda *_: pytest.fail("the target is loaded"))
    raises("nowhere: no such folder", load_models, "toy", "nowhere", "cpu", torch.float32)
    shipped = SHIPPED_DRAFTERS["toy"]
    raises("another model", load_models, checkpoint[1], shipped, "cpu", torch.float32)


def test_a_client_holds_of_the_target_only_what_drafting_needs(checkpoint):
    """The client drafts the same tokens."""
    whole = load_models(checkpoint[1], checkpoint[3], "cpu", torch.float32)
    client = load_models(checkpoint[1], checkpoint[3], "cpu", torch.float32, remote=True)
    N = client.drafter.N
    assert [layer is None for layer in client.target.layers] == [True] * (4 - N) + [False] * N
    tokens = list(range(9))
    cache = whole.target.new_cache(9)
    whole.target.hidden(torch.tensor([tokens]), cache)
    update = whole.drafter.cache_update(tokens, cache)
    drafts = []
    for models in (whole, client):
        state = DraftState(models.drafter, 64, Sampling())
        state.append_verified(update)
        drafts.append(state.draft(2, DraftLimits(4)).tokens)
    assert drafts[0] == drafts[1]


def test_fingerprints_tell_targets_and_drafters_apart(checkpoint, saved):
    ours = fingerprints(checkpoint[1], checkpoint[3])
    assert ours == fingerprints(checkpoint[1], checkpoint[3])
    assert fingerprints(checkpoint[1], None) == {"target": ours["target"]}
    shipped = find_drafter("toy", None)
    assert find_drafter(str(ROOT / "weights/toy/target"), None) == shipped
    toy = fingerprints("toy", shipped)
    assert toy["target"] != ours["target"] and toy["drafter"] != ours["drafter"]
    before = fingerprints("toy", saved)["drafter"]
    change_config(saved, rope_theta=7.0)
    assert fingerprints("toy", saved)["drafter"] != before
