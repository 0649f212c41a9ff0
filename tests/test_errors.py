"""Claims about errors and about files that are written: one line and status 2, all or nothing."""
import os
import subprocess
import sys

import pytest
from conftest import ROOT, raises

from plumbing.errors import InputError, run_command
from plumbing.files import atomic_write, checksum, read_json


@pytest.mark.parametrize("error, line", [
    (InputError("two\nlines"), "error: two lines\n"),
    (OSError(28, "No space left"), "error: [Errno 28] No space left\n"),
    (RuntimeError("cannot allocate"), "error: not enough memory: cannot allocate\n"),
], ids=lambda value: type(value).__name__)
def test_an_error_of_the_users_ends_in_one_line_and_status_2(error, line, capsys):
    def main():
        raise error

    with pytest.raises(SystemExit) as caught:
        run_command(main)
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith(line)


def test_a_bug_stays_a_traceback():
    with pytest.raises(RuntimeError):
        run_command(lambda: (_ for _ in ()).throw(RuntimeError("a bug")))


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


def test_a_package_that_is_missing_or_ctrl_c_while_it_loads_ends_without_a_traceback(tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, ROOT / "llama.py", "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.returncode != 0
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", "
                                       "name='torch')")
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stderr == "error: No module named 'torch': run `pip install -r requirements.txt`\n"
    assert done.returncode == 2
