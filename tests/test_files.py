"""Claims about files: written completely or not at all, and read as JSON."""
import os

import pytest
from conftest import raises

from plumbing.errors import InputError
from plumbing.files import atomic_write, checksum, read_json


def test_a_file_is_written_completely_or_not_at_all_with_the_permissions_of_the_umask(tmp_path):
    file = tmp_path / "new" / "a.json"
    before = os.umask(0o027)
    try:
        with atomic_write(file) as part:
            part.write_text("{}")
            part.chmod(0o600)  # as safetensors does
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o640
    with pytest.raises(KeyError), atomic_write(file) as part:
        part.write_text("half")
        raise KeyError
    assert read_json(file) == {}
    assert list(file.parent.iterdir()) == [file]


def test_the_contents_are_on_the_disk_before_the_file_has_its_name(tmp_path, monkeypatch):
    calls = []

    def note(name: str) -> None:
        original = getattr(os, name)

        def call(*args) -> None:
            calls.append(name)
            original(*args)

        monkeypatch.setattr(os, name, call)

    note("fsync")
    note("replace")
    with atomic_write(tmp_path / "a") as part:
        part.write_text("{}")
    assert calls == ["fsync", "replace"]


def test_a_file_that_cannot_be_written_or_read_is_an_input_error_that_says_why(tmp_path):
    (tmp_path / "file").write_text("[]")
    with pytest.raises(InputError, match="file/b cannot be written"):
        with atomic_write(tmp_path / "file" / "b"):
            pass
    raises("nothing.json: no such file", read_json, tmp_path / "nothing.json")
    raises("cannot be read as JSON: expected an object", read_json, tmp_path / "file")
    assert checksum(tmp_path / "file").startswith("4f53cda18c2baa0c")
