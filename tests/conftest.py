"""Shared by all tests: paths, real targets, and running a script as a user would."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
sys.path.insert(0, str(ROOT))
# More threads make tiny models no faster and a busy machine slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may fetch from the hub

import torch  # noqa: E402

import llama  # noqa: E402
import train  # noqa: E402


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def smollm2() -> tuple[llama.Llama, llama.Tokenizer]:
    """The default target and its tokenizer, fetched on first use."""
    return llama.load_model("smollm2"), llama.load_tokenizer("smollm2")


@pytest.fixture(scope="session")
def toy() -> tuple[llama.Llama, llama.Tokenizer]:
    """The shipped toy target and its tokenizer, where any trained model will do."""
    return llama.load_model("toy"), llama.load_tokenizer("toy")


@pytest.fixture(scope="session")
def library() -> dict[str, str]:
    """The functions of Python's standard library: their signatures, their sources."""
    return train.library_functions()


def run_script(name: str, *flags: object) -> subprocess.CompletedProcess:
    """Run a script of the repository; stdout, stderr and the exit status are in the result."""
    command = [sys.executable, ROOT / name, *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True)
