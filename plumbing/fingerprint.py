"""Checksums by which a resumed run knows its model and its data again, wherever they lie."""
from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Iterable

from plumbing.files import checksum

MODEL_SUFFIXES = {".safetensors", ".json", ".jinja"}


def fingerprint_files(files: Iterable[str | Path]) -> str:
    """Return a checksum of the contents of some files, in this order. Their names do not matter."""
    checksums = [checksum(file) for file in files]
    return hashlib.sha256(" ".join(checksums).encode()).hexdigest()[:16]


def fingerprint_model(path: Path) -> str:
    """Return a checksum of a .gguf file, or of those files of a Hugging Face folder that a model is
    read from."""
    if path.is_file():
        return fingerprint_files([path])
    # The folder may hold other files. A toy target's also has its text and its training run.
    files = [file for file in path.iterdir() if file.suffix in MODEL_SUFFIXES]
    return fingerprint_files(sorted(files))
