"""Claims about errors: those that are not bugs end a command in one line and status 2."""
import pytest
import torch

from plumbing.errors import MAX_MESSAGE, InputError, input_errors, run_command


def too_large_a_tensor() -> None:
    torch.empty(10**15)


def end_of(main, capsys) -> tuple[int, str]:
    """Return the exit status of a command, and what it prints to stderr."""
    with pytest.raises(SystemExit) as end:
        run_command(main)
    return end.value.code, capsys.readouterr().err


def raising(error: BaseException):
    """Return a `main` that raises an error."""

    def main() -> None:
        raise error

    return main


@pytest.mark.parametrize("main, line", [
    (raising(InputError("two\nlines")), "error: two lines\n"),
    (raising(OSError(28, "No space left")), "error: no space left\n"),
    (raising(OSError(2, "No such file or directory", "a")), "error: a: no such file or folder\n"),
    (raising(torch.OutOfMemoryError("on a GPU")), "error: not enough memory: on a GPU\n"),
    (raising(RuntimeError("Tried to allocate")), "error: not enough memory: Tried to allocate\n"),
    (raising(MemoryError()), "error: not enough memory\n"),
    (raising(FloatingPointError("NaN")), "error: NaN: use --dtype bfloat16 or float32\n"),
], ids=["input", "disk", "file", "GPU memory", "PyTorch's memory", "Python's memory", "NaN"])
def test_an_error_that_is_no_bug_ends_in_one_line_and_status_2(main, line, capsys):
    status, told = end_of(main, capsys)
    assert status == 2
    assert told.endswith(line)


def test_a_tensor_that_does_not_fit_in_memory_is_an_error_of_one_line(capsys):
    status, told = end_of(too_large_a_tensor, capsys)
    assert status == 2
    assert "error: not enough memory: " in told
    assert told.count("\n") == 1


def test_an_error_of_the_operating_system_names_its_file_once_and_shows_no_number(tmp_path):
    with pytest.raises(InputError) as error, input_errors("a.json cannot be read", OSError):
        open(tmp_path / "a.json")
    assert str(error.value) == "a.json cannot be read: no such file or folder"


def test_an_error_that_quotes_a_whole_file_is_cut(capsys):
    _, told = end_of(raising(InputError("x" * 10_000)), capsys)
    assert told.count("x") == MAX_MESSAGE


def test_ctrl_c_ends_a_command_silently(capsys):
    assert end_of(raising(KeyboardInterrupt()), capsys) == (130, "")


def test_a_bug_stays_a_traceback():
    with pytest.raises(RuntimeError):
        run_command(raising(RuntimeError("a bug")))
