"""What the tests share: where things lie, the real default target, and running a script as a person would."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models gain nothing from threads that spin, a busy machine loses

import torch  # noqa: E402

import llama  # noqa: E402


@pytest.fixture(autouse=True)
def the_same_chances_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def smollm2() -> tuple[llama.Llama, llama.Tokenizer]:
    """The default target and its tokenizer, fetched on first use."""
    return llama.load_model("smollm2"), llama.load_tokenizer("smollm2")


def run_script(name: str, *flags: object) -> subprocess.CompletedProcess:
    """Run a script of the repository; stdout, stderr and the exit status are in the result."""
    return subprocess.run([sys.executable, ROOT / name, *map(str, flags)], capture_output=True, text=True)
