"""Model folders as Hugging Face's `save_pretrained` writes them: sizes and tensors.

    config.json               the sizes, and which variant of the architecture it is
    model.safetensors         named tensors, or several such files, the shards
    generation_config.json    which tokens end an answer

app/loading.py makes a model of them, in three steps, and checks each, so that a damaged file, or a
model other than a Llama, ends in an InputError that names the culprit:

    sizes, read = read_hugging_face(path)       # the fields of a `Config` of llama.py
    model = Llama(Config(**sizes))
    load_weights(dict(model.named_parameters()), read(()), path, device, dtype)

`load_weights` converts and moves one tensor after the other, so that RAM never holds the whole
model twice. The second and the third section also serve GGUF files (plumbing/gguf.py).

A folder may state the same fact in two places:

    whether the LM head is tied    tensors named lm_head win over `tie_word_embeddings`
    the tensors                    model.safetensors wins over shards
    the stop tokens                generation_config.json wins over config.json
    RoPE                           rope_parameters win over rope_scaling, and both over the rest
"""
from __future__ import annotations

import math
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Callable, Iterator, Mapping

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from plumbing.errors import InputError, input_errors
from plumbing.files import read_json

# A function that yields (name, tensor) for the tensors of a model. The argument is a tuple of
# prefixes: a tensor whose name begins with one of the prefixes is not read.
ReadTensors = Callable[[tuple[str, ...]], Iterator[tuple[str, Tensor]]]

# --- The folder ---


def read_hugging_face(path: Path) -> tuple[dict, ReadTensors]:
    """Return the sizes of the model in a folder, and a function that yields its tensors. Raises
    InputError."""
    file = path / "config.json"
    if not file.exists():
        raise InputError(
            f"{file}: no such file, so {path} is no model: a model is a folder with a config.json, "
            "or a .gguf file"
        )
    config = read_json(file)
    if "kv_hidden_size" in config:
        raise InputError(f"{path} is a drafter, not a target: give it as --drafter")
    sizes = parse_config(config, path)
    files = weight_files(path)
    if has_head(files):  # the head may be a mere copy of the embeddings, which does no harm
        sizes["tie_word_embeddings"] = False
    return sizes, partial(read_tensors, files)


def weight_files(path: Path) -> list[Path]:
    """Return the .safetensors files of a folder: one, or several shards. Raises InputError if there
    is none."""
    single = path / "model.safetensors"
    files = [single] if single.exists() else sorted(path.glob("model-*.safetensors"))
    if not files:
        raise InputError(
            f"{single}: no such file, and no shards either (if the folder has only "
            "pytorch_model.bin, convert it to safetensors)"
        )
    return files


@contextmanager
def open_safetensors(path: Path) -> Iterator[safe_open]:
    what = f"{path}: not a safetensors file"
    with input_errors(what, SafetensorError, OSError), safe_open(path, "pt") as file:
        yield file


def has_head(files: list[Path]) -> bool:
    """Return whether the files hold weights for the LM head. Raises InputError."""
    for path in files:
        with open_safetensors(path) as file:
            if "lm_head.weight" in file.keys():
                return True
    return False


def read_tensors(
    paths: list[Path], skipped: tuple[str, ...] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for the tensors of .safetensors files, but for those whose names begin
    with one of `skipped`. Names lose the prefix `model.`. Raises InputError."""
    for path in paths:
        with open_safetensors(path) as file:
            for name in file.keys():
                short = name.removeprefix("model.")
                if not short.startswith(skipped):
                    yield short, file.get_tensor(name)


def read_stop_ids(path: Path) -> list[int]:
    """Return the ids that end an answer: what generation_config.json states or, if it states
    nothing, config.json. Raises InputError if a file cannot be read."""
    for name in ("generation_config.json", "config.json"):
        if (path / name).exists():
            stated = read_json(path / name).get("eos_token_id")
            if stated is not None:
                return stated if isinstance(stated, list) else [stated]
    return []


# --- For folders and GGUF files: the sizes ---


def parse_config(config: dict, path: Path) -> dict:
    """Return the sizes that a config.json states, with Hugging Face's defaults for those that it
    leaves out. Raises InputError, which names `path`.

    The metadata of a GGUF file are passed as such a dict, under the names of a config.json.
    """
    with input_errors(path, InputError):  # puts the path before the message of an InputError
        stated = collect_settings(config)
        check_architecture(stated)
        sizes = parse_sizes(stated)
        sizes["tie_word_embeddings"] = stated.get("tie_word_embeddings") is True
        if stated.get("rope_type") == "llama3":
            sizes["rope_factors"] = llama3_rope_factors(stated, sizes)
        elif stated.get("factor", 1) != 1:
            raise InputError("RoPE has a factor, but no rope_type that says what it is for")
        return sizes


def collect_settings(config: dict) -> dict:
    """Return what a config.json states, with the settings of RoPE among the rest. Files of
    different ages state these differently:

        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", "factor": 8.0, ...}}
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, ...}}
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, ...}}
    """
    stated = {}
    for place in (config, config.get("rope_scaling") or {}, config.get("rope_parameters") or {}):
        if not isinstance(place, dict):
            raise InputError(f"rope_scaling or rope_parameters is invalid: {place!r:.40}")
        stated |= {name: value for name, value in place.items() if value is not None}
    if "type" in stated:
        stated.setdefault("rope_type", stated["type"])
    return stated


SUPPORTED = {  # the values that are supported; each of these settings may also be left out
    "model_type": ["llama"],
    "attention_bias": [False],
    "mlp_bias": [False],
    "hidden_act": ["silu"],
    "rope_type": ["default", "llama3"],
    "partial_rotary_factor": [1],
}


def check_architecture(stated: dict) -> None:
    """Raise InputError for any architecture other than Llama's."""
    for name, supported in SUPPORTED.items():
        if name in stated and stated[name] not in supported:
            raise InputError(
                f"{name} is {stated[name]!r:.40}, but only Llama's architecture is supported, "
                f"where it is one of {supported}"
            )


SIZES = {  # the sizes that a model needs, with their types
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


def parse_sizes(stated: dict) -> dict:
    """Return the numbers of SIZES. Raises InputError."""
    heads = parse_number(stated, "num_attention_heads", int)
    defaults = {  # for what a config.json may leave out
        "num_key_value_heads": heads,
        "head_dim": parse_number(stated, "hidden_size", int) // heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
    }
    sizes = {name: parse_number(defaults | stated, name, kind) for name, kind in SIZES.items()}
    kv_heads = sizes["num_key_value_heads"]
    head_dim = sizes["head_dim"]
    if heads % kv_heads != 0 or head_dim % 2 != 0:
        raise InputError(f"invalid sizes: {heads} heads, {kv_heads} kv heads, head size {head_dim}")
    return sizes


MAXIMA = {  # a model with larger sizes would take too long to make, or too much memory
    "num_hidden_layers": 2**12,
    "head_dim": 2**12,
    "max_position_embeddings": 2**22,
}


def parse_number(stated: dict, name: str, kind: type) -> int | float:
    """Return a positive number that is stated. Raises InputError."""
    value = stated.get(name)
    # In JSON a float may look like an int: 10000 for 10000.0.
    kinds = [int] if kind is int else [int, float]
    if type(value) not in kinds or not 0 < value <= MAXIMA.get(name, 2**62):
        raise InputError(f"{name} is missing or invalid: {value!r:.40}")
    return value


def llama3_rope_factors(stated: dict, sizes: dict) -> tuple[float, ...]:
    """Return divisors (D/2) of the rotary frequencies: Llama-3.1's way to a longer context.

    A frequency that turns less than `low` times within the `original` context is divided by
    `factor`. One that turns more than `high` times stays as it is. Between the two limits, the
    result is a blend of both. Raises InputError.
    """
    factor = parse_number(stated, "factor", float)
    low = parse_number(stated, "low_freq_factor", float)
    high = parse_number(stated, "high_freq_factor", float)
    original = parse_number(stated, "original_max_position_embeddings", float)
    exponents = torch.arange(0, sizes["head_dim"], 2, dtype=torch.float64) / sizes["head_dim"]
    frequencies = sizes["rope_theta"] ** (-exponents)  # (D/2), in radians per token
    turns = original / math.tau * frequencies  # (D/2)
    unscaled = ((turns - low) / (high - low)).clamp(0, 1)  # 1: the frequency stays
    return tuple((1 / (unscaled + (1 - unscaled) / factor)).tolist())


# --- For folders and GGUF files: the tensors ---

CHECKPOINT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Tables of rotary frequencies, in folders and in GGUF files. A model has no parameters for them,
# because it computes its own table.
IGNORED_TENSORS = ("rotary_emb.inv_freq", "rope_freqs.weight")


def load_weights(
    expected: Mapping[str, Tensor],
    tensors: Iterator[tuple[str, Tensor]],
    path: Path,
    device,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Return the tensors by name, moved to a device and converted to a dtype. expected: a model's
    parameters, of which only the names and shapes matter.

    Raises InputError for a tensor that is missing, unknown, of the wrong shape or not finite.
    """
    missing = {name: parameter.shape for name, parameter in expected.items()}
    loaded = {}
    for name, tensor in tensors:
        what = f"{path}: tensor {name}"
        if name.endswith(IGNORED_TENSORS):
            continue
        if name not in missing:
            raise InputError(
                f"{what} is unknown or occurs twice: only the weights of a Llama, or of a drafter, "
                "are supported, and no quantized ones in .safetensors"
            )
        shape = missing.pop(name)
        if tensor.shape != shape or tensor.dtype not in CHECKPOINT_DTYPES:
            found = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise InputError(f"{what} is {found}, expected floats {tuple(shape)}")
        loaded[name] = tensor.to(device, dtype)
        if not loaded[name].isfinite().all():
            raise InputError(f"{what} holds NaN, or values too large for {dtype}")
    if missing:
        raise InputError(f"{path}: tensor {next(iter(missing))} missing")
    return loaded
