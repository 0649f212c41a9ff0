"""Claims about files: written completely or not at all, read as JSON, and known again."""
import os

import pytest
from conftest import raises

from plumbing.errors import InputError
from plumbing.files import (
    atomic_write,
    checksum,
    fingerprint_files,
    fingerprint_model,
    read_json,
)


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


def test_a_file_that_cannot_be_written_or_read_is_an_input_error_that_says_why(tmp_path):
    (tmp_path / "file").write_text("[]")
    with pytest.raises(InputError, match="file/b cannot be written"):
        with atomic_write(tmp_path / "file" / "b"):
            pass
    raises("nothing.json: no such file", read_json, tmp_path / "nothing.json")
    raises("cannot be read as JSON: expected an object", read_json, tmp_path / "file")
    assert checksum(tmp_path / "file").startswith("4f53cda18c2baa0c")


def test_files_are_known_again_by_their_contents_and_order_whatever_they_are_called(tmp_path):
    for name, text in (("a", "1"), ("b", "2"), ("c", "1")):
        (tmp_path / name).write_text(text)
    a, b, c = (tmp_path / name for name in "abc")
    assert fingerprint_files([a, b]) == fingerprint_files([c, b]) != fingerprint_files([b, a])


def test_a_model_is_known_again_by_the_files_that_it_is_read_from(tmp_path):
    for name in ("config.json", "model.safetensors", "chat_template.jinja"):
        (tmp_path / name).write_text("a")
    before = fingerprint_model(tmp_path)
    (tmp_path / "log.txt").write_text("a")
    assert fingerprint_model(tmp_path) == before
    (tmp_path / "chat_template.jinja").write_text("b")
    assert fingerprint_model(tmp_path) != before
    weights = tmp_path / "model.safetensors"
    assert fingerprint_model(weights) == fingerprint_files([weights])
