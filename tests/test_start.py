"""Claims about what ends a script while its packages load: no traceback, except in a library."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

INTERRUPTED = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
MISSING = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"


def run_with_torch(folder: Path, torch: str, *command) -> tuple[int, str]:
    """Return the exit status and the stderr of Python, run with a torch.py of this text."""
    (folder / "torch.py").write_text(torch)
    environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"}
    command = [sys.executable, *command]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize("command", [[ROOT / "llama.py"], ["-m", "experiments.bench"]], ids=str)
def test_a_missing_package_or_ctrl_c_while_it_loads_ends_a_script_without_a_traceback(
    tmp_path, command
):
    assert run_with_torch(tmp_path, INTERRUPTED, *command, "--help") == (130, "")
    line = "error: No module named 'torch': run `pip install -r requirements.txt`\n"
    assert run_with_torch(tmp_path, MISSING, *command, "--help") == (2, line)


@pytest.mark.parametrize("torch, error", [
    (INTERRUPTED, "KeyboardInterrupt"), (MISSING, "ModuleNotFoundError")
], ids=["Ctrl-C", "missing"])
def test_a_program_that_imports_a_script_as_a_library_gets_the_exception(tmp_path, torch, error):
    _, told = run_with_torch(tmp_path, torch, "-c", "import llama")
    assert told.startswith("Traceback")
    assert told.splitlines()[-1].startswith(error)
