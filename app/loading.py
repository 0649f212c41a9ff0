"""Checkpoints: loading and saving, and making models ready to answer.

    models = load_models("smollm2", None, "cpu", torch.bfloat16)    # packed, ready to answer
    target, tokenizer = load_target("smollm2", "cpu", torch.float32)
    drafter = load_drafter("runs/drafter", target)                  # not packed, as for training

`load_llama` of llama.py loads a plain Hugging Face folder in some thirty lines. Here models also
come as .gguf files, from the hub or by name (plumbing/hub.py), and a mistake is an InputError of
one line. What is cheap to check is checked before the target's weights are read, which takes
longest. The last section has the checks.
"""
from __future__ import annotations

import json
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from app.exact import ExactLlama
from app.packed import pack_models
from app.vocabulary import LimitedDrafter
from llama import Config, Llama
from moa import TRAINED, Drafter, DrafterConfig, kv_hidden_size
from plumbing.errors import InputError, input_errors
from plumbing.files import atomic_write, fingerprint_files, fingerprint_model, read_json
from plumbing.gguf import read_gguf
from plumbing.hub import (
    SHIPPED_DRAFTERS,
    TOY_MODEL,
    fetch_from_hub,
    is_hub_id,
    resolve_path,
)
from plumbing.huggingface import (
    ReadTensors,
    load_weights,
    parse_number,
    read_hugging_face,
    read_tensors,
)
from plumbing.terminal import waiting_line
from plumbing.tokenizer import Tokenizer, load_tokenizer

# --- Models that are ready to answer ---


class Models(NamedTuple):
    """What answers prompts."""

    target: Llama
    tokenizer: Tokenizer
    drafter: Drafter | None  # None: the target alone


def load_models(
    model: str, drafter: str | Path | None, device: str, dtype: torch.dtype, remote: bool = False
) -> Models:
    """Load a target, its tokenizer and a drafter, packed.

    drafter: its folder; None: the one that is shipped for this model. remote: whether the target is
    on a server. To draft, a client needs only the target's embeddings, LM head and last N layers,
    so only these are loaded. Raises InputError.
    """
    folder = find_drafter(model, drafter)
    path = resolve_path(model)
    sizes, _ = read_sizes(path)
    saved = read_drafter(folder, sizes)
    last = saved.config.target_layer_inference if remote else None
    target, tokenizer = load_target(path, device, dtype, last)
    loaded = load_drafter(folder, target)
    return Models(make_ready(target, [loaded]), tokenizer, loaded)


def load_target_alone(
    model: str, device: str, dtype: torch.dtype, last: int | None = None
) -> Models:
    """Load a target (or only its `last` layers) and its tokenizer, packed, without a drafter.
    Raises InputError."""
    target, tokenizer = load_target(model, device, dtype, last)
    return Models(make_ready(target, []), tokenizer, None)


def make_ready(target: Llama, drafters: list[Drafter]) -> Llama:
    """Pack a target and its drafters, and return the target to use from now on. A line on stderr
    tells if texts with drafts may differ from the target's own in rare words."""
    if target.device.type == "cuda":
        # cuDNN's attention plans again for each new shape, which takes tens of milliseconds
        # (experiments/results/smollm2/gpu.json), and while generating every pass has a new shape,
        # because the cache grows. This turns it off for the whole process.
        torch.backends.cuda.enable_cudnn_sdp(False)
    with waiting_line("packing the weights ..."):
        packed = pack_models(target, drafters)
    if None in packed.layers:  # a client's target, which verifies nothing
        return packed
    if packed.device.type == "cpu" and not isinstance(packed, ExactLlama):
        dtype = str(packed.dtype).removeprefix("torch.")
        reason = f"this CPU and this PyTorch have no exact kernels for {dtype}"
        if packed.dtype == torch.float16:
            reason = "float16 is slow on a CPU, and not exact (use bfloat16 or float32)"
        print(f"{reason}: with drafts, texts may differ from the target's own", file=sys.stderr)
    return packed


def fingerprints(model: str, drafter: str | Path | None) -> dict[str, str]:
    """Return checksums of a model's files and, if there is one, of a drafter's folder. A client and
    its server compare theirs."""
    found = {"target": fingerprint_model(resolve_path(model))}
    if drafter is not None:
        files = [Path(drafter, name) for name in DRAFTER_FILES]
        found["drafter"] = fingerprint_files(files)
    return found


# --- The target ---


def read_sizes(path: Path) -> tuple[Config, ReadTensors]:
    """Return the sizes of the model in a folder or a .gguf file, and a function that yields its
    tensors. Raises InputError."""
    read_checkpoint = read_gguf if path.suffix == ".gguf" else read_hugging_face
    sizes, read = read_checkpoint(path)
    return Config(**sizes), read


def load_model(
    path: str | Path, device="cpu", dtype: torch.dtype = torch.float32, last: int | None = None
) -> Llama:
    """Load a frozen Llama from a Hugging Face folder, a .gguf file, a hub id, "smollm2" or "toy".

    With `last`, load only this many last layers, and put None in place of the others. (A client
    runs only these layers, in `run_target_layers` of moa.py.) Raises InputError.
    """
    path = resolve_path(path)
    config, read = read_sizes(path)
    first = 0 if last is None else config.num_hidden_layers - last
    skipped = tuple(f"layers.{i}." for i in range(first))
    with input_errors(path, RuntimeError, TypeError):  # PyTorch raises either for impossible sizes
        with torch.device("meta"):  # shapes without data: the weights come from the file
            model = Llama(config)
        for i in range(first):
            model.layers[i] = None
        expected = dict(model.named_parameters())  # without a tied head
        weights = load_weights(expected, read(skipped), path, device, dtype)
        model.load_state_dict(weights, strict=False, assign=True)
        model.tie_weights()  # again, to the embeddings that were loaded
    return model.to(device)  # moves the rotary table; the weights are there already


def load_target(
    path: str | Path, device: str, dtype: torch.dtype, last: int | None = None
) -> tuple[Llama, Tokenizer]:
    """Load a model (or only its `last` layers) and its tokenizer. Raises InputError."""
    path = resolve_path(path)
    tokenizer = load_tokenizer(path)
    with waiting_line("loading the target ..."):
        model = load_model(path, device, dtype, last)
    ids = tokenizer.chat([{"role": "user", "content": ""}]) + list(tokenizer.stop_ids)
    size = model.config.vocab_size
    if max(ids) >= size:
        raise InputError(f"{path}: the tokenizer has tokens beyond the model's {size} embeddings")
    return model, tokenizer


# --- Drafters: a folder of config.json and model.safetensors, in the authors' names and shapes ---

DRAFTER_FILES = ("config.json", "model.safetensors")


def find_drafter(model: str, drafter: str | Path | None) -> Path:
    """Return a drafter's folder: `drafter` or, if that is None, the one that is shipped for the
    model. Raises InputError if there is none."""
    if drafter is not None:
        return Path(drafter)
    if model in SHIPPED_DRAFTERS:
        return SHIPPED_DRAFTERS[model]
    if Path(model).resolve() == resolve_path(TOY_MODEL):
        return SHIPPED_DRAFTERS[TOY_MODEL]
    # Both raise an InputError of their own for what is no model.
    if is_hub_id(model):
        fetch_from_hub(model, ["config.json"])  # not the weights, only for this
    else:
        read_sizes(resolve_path(model))
    raise InputError(
        f"no drafter is shipped for {model}: train one (python train.py --model {model} "
        "--data FILE) and name it with --drafter"
    )


class SavedDrafter(NamedTuple):
    """What a drafter's folder holds."""

    stated: dict  # in config.json
    config: DrafterConfig  # the same, completed
    tensors: dict[str, Tensor]


def read_drafter(path: Path, sizes: Config) -> SavedDrafter:
    """Read a drafter's folder. Raises InputError if a file is missing or damaged, or if the drafter
    does not fit a target of these sizes."""
    if not path.is_dir():
        raise InputError(f"{path}: no such folder")
    config_file, weights_file = (path / name for name in DRAFTER_FILES)
    for file in (config_file, weights_file):
        if not file.exists():
            raise InputError(f"{path}: no drafter is there ({file.name} is missing)")
    stated = {name: value for name, value in read_json(config_file).items() if value is not None}
    check_target(stated, sizes, path)
    tensors = dict(read_tensors([weights_file]))
    with input_errors(config_file, InputError, TypeError, ZeroDivisionError):
        config = complete_config(stated, tensors, sizes)
        check_sizes(config, sizes)
    return SavedDrafter(stated, config, tensors)


def load_drafter(path: str | Path, target: Llama) -> Drafter:
    """Load a drafter of `target`, on its device and in its dtype. The target must not be packed.

    Raises InputError if a file is missing or damaged, or does not fit the target.
    """
    path = Path(path)
    stated, config, tensors = read_drafter(path, target.config)
    # PyTorch raises any of the last three for sizes and vocabularies that are impossible.
    kinds = (InputError, RuntimeError, TypeError, IndexError)
    with input_errors(path, *kinds), torch.device("meta"):
        drafter = new_drafter(target, config, stated.get("draft_vocabulary"))
    expected = drafter.trained_parameters()
    weights = load_weights(expected, iter(tensors.items()), path, target.device, target.dtype)
    drafter.load_state_dict(weights, strict=False, assign=True)
    return drafter.requires_grad_(False).eval()


def complete_config(stated: dict, tensors: dict[str, Tensor], sizes: Config) -> DrafterConfig:
    """Return a complete config. What config.json does not state (the authors' leaves some fields
    out) is taken from the target or, for kv heads and MLP widths, from the tensors' shapes. Raises
    InputError for a field that is no positive number."""
    values = {
        "num_attention_heads": sizes.num_attention_heads,
        "layer_self_attention_num_attention_heads": sizes.num_attention_heads,
        "rms_norm_eps": sizes.rms_norm_eps,
        "rope_theta": sizes.rope_theta,
    }
    values |= stated
    reused = values.pop("target_layer_inference", 0)  # may be 0; `check_sizes` checks it
    rows = {name: len(tensor) for name, tensor in tensors.items()}
    for layer in ("self_attention", "cross_attention", "layer_self_attention"):
        heads = values.get(f"{layer}_num_attention_heads", values["num_attention_heads"])
        # A missing tensor counts as one row. `load_weights` reports it later.
        q_rows = rows.get(f"{layer}.self_attn.q_proj.weight", 1)
        k_rows = rows.get(f"{layer}.self_attn.k_proj.weight", 1)
        mlp_width = rows.get(f"{layer}.mlp.gate_proj.weight", 1)
        # q_proj has heads * D rows and k_proj kv_heads * D, so kv_heads = heads * k_rows / q_rows.
        values.setdefault(f"{layer}_num_key_value_heads", heads * k_rows // q_rows)
        values.setdefault(f"{layer}_intermediate_size", mlp_width)
    numbers = {}
    for field in fields(DrafterConfig):
        if field.name != "target_layer_inference":
            kind = float if field.name in ("rms_norm_eps", "rope_theta") else int
            numbers[field.name] = parse_number(values, field.name, kind)
    return DrafterConfig(**numbers, target_layer_inference=reused)


def new_drafter(
    target: Llama,
    config: DrafterConfig,
    vocabulary: tuple[int, ...] | list[int] | None = None,
) -> Drafter:
    """Make a drafter with random weights. Its target must not be packed yet.

    vocabulary: the only tokens to draft; None: all tokens. Raises InputError for sizes that do not
    fit the target or each other.
    """
    check_sizes(config, target.config)
    if vocabulary is None:
        return Drafter(target, config)
    known = set(vocabulary).intersection(range(target.config.vocab_size))
    if not vocabulary or len(known) < len(vocabulary):
        raise InputError("draft_vocabulary must be a list of distinct tokens of the target")
    return LimitedDrafter(target, config, tuple(vocabulary))


def save_drafter(
    drafter: Drafter, path: Path, dtype: torch.dtype = torch.bfloat16, target_name: str = ""
) -> None:
    """Write config.json and model.safetensors into a folder, each completely or not at all.

    dtype: of the saved weights. target_name: the target, as named with --model. Raises RuntimeError
    for a drafter that is packed.
    """
    config = asdict(drafter.config) | describe_target(drafter.target.config)
    config["draft_vocabulary"] = getattr(drafter, "vocabulary", None)
    config["target_model"] = target_name
    tensors = {}
    for name, tensor in drafter.state_dict().items():
        if name.startswith(TRAINED):
            tensors[name] = tensor.to("cpu", dtype).contiguous()
    config_file, weights_file = (path / name for name in DRAFTER_FILES)
    with (
        atomic_write(config_file) as config_part,
        atomic_write(weights_file) as weights_part,
    ):
        config_part.write_text(json.dumps(config))
        save_file(tensors, weights_part, metadata={"format": "pt"})


# --- Does a drafter fit its target? ---


def describe_target(sizes: Config) -> dict[str, int]:
    """Return what a drafter's config.json states about its target. The authors' code reads the
    first three fields."""
    return {
        "hidden_size": sizes.hidden_size,
        "vocab_size": sizes.vocab_size,
        "kv_hidden_size": kv_hidden_size(sizes),
        "target_num_hidden_layers": sizes.num_hidden_layers,
    }


def check_target(stated: dict, sizes: Config, path: Path) -> None:
    """Raise InputError if a drafter's config.json states that its target has different sizes."""
    for size, ours in describe_target(sizes).items():
        theirs = stated.get(size, ours)
        if theirs != ours:
            raise InputError(
                f"{path}: this drafter belongs to another model, whose {size} is {theirs!r:.40}, "
                f"not {ours}: add --model {stated.get('target_model', 'MODEL')}"
            )


def check_sizes(config: DrafterConfig, sizes: Config) -> None:
    """Raise InputError if a drafter's sizes do not fit each other, or a target of these sizes."""
    reused = config.target_layer_inference
    if type(reused) is not int or not 0 <= reused <= sizes.num_hidden_layers:
        raise InputError(
            f"target_layer_inference {reused}: expected a whole number, at most the target's "
            f"{sizes.num_hidden_layers} layers (train.py: --tli)"
        )
    layer_heads = config.layer_self_attention_num_attention_heads
    layers = [
        ("self_attention", sizes.hidden_size, config.num_attention_heads),
        ("cross_attention", sizes.hidden_size, config.num_attention_heads),
        ("layer_self_attention", kv_hidden_size(sizes), layer_heads),
    ]
    for layer, width, heads in layers:
        kv_heads = getattr(config, f"{layer}_num_key_value_heads")
        head_dim = width // heads
        if heads % kv_heads != 0 or head_dim < 2 or head_dim % 2 != 0:
            raise InputError(
                f"{layer}: num_attention_heads {heads} of size {head_dim} with num_key_value_heads "
                f"{kv_heads}: kv heads must divide the heads, whose size must be even, for RoPE "
                "(train.py: --lsa-heads, --kv-heads)"
            )
