"""Shared by all tests: paths, the real default target, and running a script as a user would."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads make tiny models no faster and a busy machine slower
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may fetch from the hub

import torch  # noqa: E402

import llama  # noqa: E402


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def smollm2() -> tuple[llama.Llama, llama.Tokenizer]:
    """The default target and its tokenizer, fetched on first use."""
    return llama.load_model("smollm2"), llama.load_tokenizer("smollm2")


def run_script(name: str, *flags: object) -> subprocess.CompletedProcess:
    """Run a script of the repository; stdout, stderr and the exit status are in the result."""
    return subprocess.run([sys.executable, ROOT / name, *map(str, flags)], capture_output=True, text=True)
