"""Files: written completely or not at all, and read as JSON."""
from __future__ import annotations

import hashlib
import json
import os
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

from safetensors import SafetensorError

from plumbing.errors import InputError, input_errors


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a file to write, which replaces `path` once it is complete.

    It makes the folder, too. If an exception ends the writing, `path` stays as it was. Raises
    InputError if the disk is full or the place cannot be written.
    """
    part = Path(f"{path}.part")
    # On a full disk Python raises OSError, torch.save RuntimeError and safetensors its own error.
    with input_errors(f"{path} cannot be written", OSError, RuntimeError, SafetensorError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)  # a process that was killed may have left it
        part.touch()
        permissions = part.stat().st_mode  # the user's umask gives these to a new file
        try:
            yield part
            part.chmod(permissions)  # safetensors makes files that only their owner may read
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
