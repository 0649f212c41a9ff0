"""Files: atomic writes, reading JSON, and checksums. Used wherever a program keeps something: by
checkpoints, logs and downloads here, by app/loading.py and by experiments/."""
from __future__ import annotations

import hashlib
import json
import os
from contextlib import contextmanager
from pathlib import Path
from typing import Iterable, Iterator

from safetensors import SafetensorError

from plumbing.errors import InputError, input_errors


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file, which replaces `path` once it is complete.

    The folder is made if it does not exist. If an exception or a power failure ends the writing,
    `path` stays as it was. Raises InputError "`path` cannot be written" if the disk is full or
    `path` is not writable, and for every other OSError, RuntimeError or SafetensorError that the
    caller's block raises. The block should therefore only write.
    """
    part = Path(f"{path}.part")
    # On a full disk Python raises OSError, torch.save RuntimeError and safetensors its own error.
    with input_errors(f"{path} cannot be written", OSError, RuntimeError, SafetensorError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)  # left by a process that was killed
        part.touch()
        permissions = part.stat().st_mode  # the user's umask gives these to a new file
        try:
            yield part
            part.chmod(permissions)  # safetensors makes files that only their owner may read
            with open(part, "rb") as written:
                # Without this the name might be on the disk before the contents are.
                os.fsync(written.fileno())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def read_json(path: Path) -> dict:
    """Return the object that a JSON file holds. Raises InputError."""
    if not path.exists():
        raise InputError(f"{path}: no such file")
    with input_errors(f"{path} cannot be read as JSON", OSError, ValueError, RecursionError):
        value = json.loads(path.read_bytes())
        if not isinstance(value, dict):
            raise ValueError("expected an object in braces")
    return value


def checksum(path: str | Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint_files(files: Iterable[str | Path]) -> str:
    """Return a checksum of the contents of several files, in this order. Their names do not matter.

    The checksum is cut to 16 digits, because people read it in messages.
    """
    checksums = [checksum(file) for file in files]
    return hashlib.sha256(" ".join(checksums).encode()).hexdigest()[:16]


def fingerprint_model(path: Path) -> str:
    """Return a checksum of a .gguf file, or of those files of a Hugging Face folder from which a
    model and its tokenizer may be read."""
    if path.is_file():
        return fingerprint_files([path])
    # The folder may hold other files. A toy target's folder also holds the text on which the target
    # was trained, and the log and the checkpoint of that training.
    suffixes = (".safetensors", ".json", ".jinja")
    files = [file for file in path.iterdir() if file.suffix in suffixes]
    return fingerprint_files(sorted(files))
