"""Model folders as Hugging Face's `save_pretrained` writes them: sizes and tensors.

    config.json                     the sizes, and which variant of the architecture it is
    model.safetensors               named tensors, or several such files (shards) and beside them
    model.safetensors.index.json    which shard holds which tensor
    generation_config.json          which tokens end an answer

A file may be damaged, or be of a model that is not a Llama. Each such case ends in one InputError
that names the culprit. Where a fact is stated twice, both have to agree. Sizes leave as a plain
dict. Tensors are read, converted and moved one at a time, into a module on PyTorch's meta device,
where tensors have a shape but no data: so the whole is never in RAM twice.
"""
from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Callable, Iterator

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from plumbing.errors import InputError, input_errors
from plumbing.files import read_json

# --- Tensors ---

CHECKPOINT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# What a checkpoint may hold without a place for it in the model: tables of rotary frequencies,
# which we compute.
IGNORED_TENSORS = ("rotary_emb.inv_freq", "rope_freqs.weight")

# Names of tensors, each with a function that reads it.
Readers = Iterator[tuple[str, Callable[[], Tensor]]]


def read_tensors(*paths: Path) -> Readers:
    """Yield every tensor of .safetensors files, by its name without the prefix `model.`.

    Each is to be read before the next one is asked for. Raises InputError.
    """
    for path in paths:
        what = f"{path}: not a safetensors file"
        with input_errors(what, SafetensorError, OSError), safe_open(path, "pt") as file:
            for name in file.keys():
                yield name.removeprefix("model."), partial(file.get_tensor, name)


def load_weights(
    module: nn.Module, tensors: Iterator[tuple[str, Tensor]], path: Path, device, dtype
) -> None:
    """Give a module on the meta device its tensors. Raises InputError for what does not fit."""
    missing = {name: parameter.shape for name, parameter in module.named_parameters()}
    loaded = {}
    for name, tensor in tensors:
        what = f"{path}: tensor {name}"
        if name in missing:
            shape = missing.pop(name)
            if tensor.shape != shape or tensor.dtype not in CHECKPOINT_DTYPES:
                found = f"{tensor.dtype} {tuple(tensor.shape)}"
                raise InputError(f"{what} is {found}, expected floats {tuple(shape)}")
            loaded[name] = tensor.to(device, dtype)
            if not loaded[name].isfinite().all():
                raise InputError(f"{what} holds NaN, or values too large for {dtype}")
        elif name in loaded:
            raise InputError(f"{what} occurs twice")
        elif not name.endswith(IGNORED_TENSORS):
            raise InputError(
                f"{what} is unknown: only {type(module).__name__}'s own tensors are supported, and "
                "no quantized ones in .safetensors"
            )
    if missing:
        raise InputError(f"{path}: tensor {next(iter(missing))} missing")
    # Not strict: a tied head has no tensor of its own. assign: copying into the meta device would
    # do nothing.
    module.load_state_dict(loaded, strict=False, assign=True)


# --- The folder ---


def read_hugging_face(path: Path) -> tuple[dict, Readers]:
    """Read a folder's sizes and tensors. Raises InputError."""
    raw = read_json(path / "config.json")
    if "kv_hidden_size" in raw:
        raise InputError(f"{path} is a drafter, not a target: give it as --drafter")
    sizes = parse_config(raw, path)
    files = weight_files(path)
    names = {name for name, _ in read_tensors(*files)}
    # A config may say that the head is tied to the embeddings where the file has other weights for
    # it. (Some have a copy of the embeddings there, which does no harm.)
    if "lm_head.weight" in names:
        sizes["tie_word_embeddings"] = False
    return sizes, read_tensors(*files)


def weight_files(path: Path) -> list[Path]:
    """Return the .safetensors files of a folder. Raises InputError if one is missing."""
    single = path / "model.safetensors"
    if single.exists():  # others beside it are copies
        return [single]
    index = path / "model.safetensors.index.json"
    if not index.exists():
        raise InputError(
            f"{single}: no such file, and no index of several (where there is only "
            "pytorch_model.bin: convert it)"
        )
    with input_errors(f"{index}: the weight_map is invalid", AttributeError, TypeError):
        files = [path / name for name in sorted(set(read_json(index)["weight_map"].values()))]
    for file in files:
        if not file.exists():
            raise InputError(f"{file}: no such file, but {index.name} names it")
    return files


def read_stop_ids(path: Path) -> list[int]:
    """Return what generation_config.json states or, if it states nothing, config.json."""
    for name in ("generation_config.json", "config.json"):
        if (path / name).exists():
            stated = read_json(path / name).get("eos_token_id")
            if stated is not None:
                return stated if isinstance(stated, list) else [stated]
    return []


# --- config.json ---

SIZES = {  # those that a model is made of, and of which type they are
    "vocab_size": int,
    "hidden_size": int,
    "intermediate_size": int,
    "num_hidden_layers": int,
    "num_attention_heads": int,
    "num_key_value_heads": int,
    "head_dim": int,
    "rms_norm_eps": float,
    "rope_theta": float,
    "max_position_embeddings": int,
}
MAXIMA = {  # beyond them a model would take too long to make, or too much memory
    "num_hidden_layers": 2**12,
    "head_dim": 2**12,
    "max_position_embeddings": 2**22,
}
SUPPORTED = {  # what a config.json may say, unless it says nothing of it
    "model_type": ["llama"],
    "attention_bias": [False],
    "mlp_bias": [False],
    "hidden_act": ["silu"],
    "rope_type": ["default", "none", "llama3"],
    "partial_rotary_factor": [1],
}
LLAMA3_ROPE = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
)
ROPE_SETTINGS = ("rope_type", "rope_theta", "partial_rotary_factor", *LLAMA3_ROPE)


def parse_config(raw: dict, path: Path) -> dict:
    """Return the sizes in a Hugging Face config.json, with its defaults: what llama.py's `Config`
    is made of. Raises InputError."""
    with input_errors(path, InputError):  # puts the path before each message
        raw = raw | rope_settings(raw)
        check_architecture(raw)
        heads = config_number(raw, "num_attention_heads")
        defaults = {
            "num_key_value_heads": heads,
            "head_dim": config_number(raw, "hidden_size") // heads,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "max_position_embeddings": 2048,
        }
        raw = defaults | {name: value for name, value in raw.items() if value is not None}
        sizes = {name: config_number(raw, name) for name in SIZES}
        kv_heads = sizes["num_key_value_heads"]
        head_dim = sizes["head_dim"]
        rotary_dim = raw.get("rotary_dim", head_dim)  # only GGUF files state it
        if heads % kv_heads != 0 or head_dim % 2 != 0 or rotary_dim != head_dim:
            raise InputError(
                f"invalid sizes: {heads} heads, {kv_heads} kv heads, "
                f"head size {head_dim}, of which RoPE turns {rotary_dim}"
            )
        sizes["tie_word_embeddings"] = raw.get("tie_word_embeddings") is True
        if raw.get("rope_type") == "llama3":
            sizes["rope_factors"] = llama3_rope_factors(raw)
        elif raw.get("factor", 1) != 1:
            raise InputError("RoPE has a factor, but no rope_type that says what it is for")
        return sizes


def rope_settings(raw: dict) -> dict:
    """Return what a config states of RoPE, collected from the three places where it may stand.

    Raises InputError if they contradict each other.
    """
    places = [{name: raw.get(name) for name in ROPE_SETTINGS}]
    for name in ("rope_scaling", "rope_parameters"):  # in older and in newer files
        place = raw.get(name) or {}
        if not isinstance(place, dict):
            raise InputError(f"{name} is invalid: {place!r:.40}")
        places.append(place)
    settings = {}
    for place in places:
        for name, value in place.items():
            name = "rope_type" if name == "type" else name  # as older files call it
            if value is None:
                continue
            if settings.setdefault(name, value) != value:
                raise InputError(f"{name} is {settings[name]!r:.40} and also {value!r:.40}")
    return settings


def check_architecture(raw: dict) -> None:
    """Raises InputError for anything but Llama."""
    for name, supported in SUPPORTED.items():
        value = raw.get(name)
        if value is not None and value not in supported:
            raise InputError(
                f"{name} is {value!r:.40}, but only Llama's architecture is supported, "
                f"where it is one of {supported}"
            )


def config_number(raw: dict, name: str) -> int | float:
    """Return a positive number that a config states. Raises InputError."""
    value = raw.get(name)
    # Where a float is expected JSON may hold an int: 10000 for 10000.0.
    kinds = [int] if SIZES.get(name) is int else [int, float]
    if type(value) not in kinds or not 0 < value <= MAXIMA.get(name, 2**62):
        raise InputError(f"{name} is missing or invalid: {value!r:.40}")
    return value


def llama3_rope_factors(raw: dict) -> tuple[float, ...]:
    """Return divisors (D/2) of the rotary frequencies: Llama-3.1's way to a longer context.

    A frequency that turns less than `low_freq_factor` times within the original context is
    divided by `factor`, one that turns more than `high_freq_factor` times stays as it is, and
    between the two it is a blend.
    """
    factor, low, high, original = (config_number(raw, name) for name in LLAMA3_ROPE)
    head_dim = raw["head_dim"]
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    turns = original / math.tau * raw["rope_theta"]**-exponents  # (D/2)
    unscaled = ((turns - low) / (high - low)).clamp(0, 1)  # 1: it stays
    return tuple((1 / (unscaled + (1 - unscaled) / factor)).tolist())
