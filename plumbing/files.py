"""Files: written completely or not at all, read as JSON, and hashed."""
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
    """Yield a file to write, which replaces `path` once it is complete. Makes its folder. Raises
    InputError."""
    part = Path(f"{path}.part")
    with input_errors(f"{path} cannot be written", OSError, RuntimeError, SafetensorError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)  # of a process that was killed
        part.touch()
        permissions = part.stat().st_mode  # those that the user's umask gives to a new file
        try:
            yield part
            part.chmod(permissions)  # safetensors writes files that only their owner may read
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
    """Hash all bytes of a file, with SHA-256."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
