"""Shared by all tests: paths, real targets, and a tiny one on disk."""
import gc
import json
import os
import shutil
import sys
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
UNTIED = GOLDEN / "llama-tiny-untied"
TIED = GOLDEN / "llama-tiny-tied-scaled"
sys.path.insert(0, str(ROOT))
# More threads make tiny models no faster and a busy machine slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may fetch from the hub

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from tiny_models import CHATML, LETTERS, byte_tokenizer, new_drafter, new_target  # noqa: E402

from app.loading import load_drafter, load_model, make_ready, save_drafter  # noqa: E402
from experiments.toy import library_functions  # noqa: E402
from llama import Llama  # noqa: E402
from moa import Drafter  # noqa: E402
from plumbing.devices import DTYPES, choose_dtype  # noqa: E402
from plumbing.errors import InputError  # noqa: E402
from plumbing.hub import SHIPPED_DRAFTERS  # noqa: E402
from plumbing.tokenizer import Tokenizer, load_tokenizer  # noqa: E402


def raises(culprit: str, call, *args) -> None:
    """The call ends in an InputError that names the culprit."""
    with pytest.raises(InputError) as caught:
        call(*args)
    assert culprit in str(caught.value)


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def case_name(value: object) -> str:
    """How a parametrized case is called."""
    return ascii(value)[:50]


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def smollm2() -> tuple[Llama, Tokenizer]:
    """The default target and its tokenizer, fetched on first use."""
    return load_model("smollm2"), load_tokenizer("smollm2")


@pytest.fixture(scope="session")
def packed_smollm2(smollm2) -> tuple[Llama, Drafter]:
    """The default target and its drafter, packed, as speculate.py packs them."""
    target = deepcopy(smollm2[0])
    drafter = load_drafter(SHIPPED_DRAFTERS["smollm2"], target)
    return make_ready(target, [drafter]), drafter


@pytest.fixture(scope="session")
def ready_smollm2(packed_smollm2) -> tuple[Llama, Drafter]:
    """The same in the type in which it is computed by default, which a CPU chooses."""
    dtype = DTYPES[choose_dtype("cpu", None)]
    if dtype == torch.float32:
        return packed_smollm2
    target = load_model("smollm2", "cpu", dtype)
    drafter = load_drafter(SHIPPED_DRAFTERS["smollm2"], target)
    return make_ready(target, [drafter]), drafter


@pytest.fixture(scope="session")
def toy() -> tuple[Llama, Tokenizer]:
    """The shipped toy target and its tokenizer, where any trained model will do."""
    return load_model("toy"), load_tokenizer("toy")


@pytest.fixture(scope="session")
def library() -> dict[str, str]:
    """The functions of Python's standard library: their signatures, their sources."""
    gc.disable()  # it would look through the syntax trees again and again, in vain
    functions = library_functions()
    gc.enable()
    return functions


@pytest.fixture
def copy(tmp_path) -> Path:
    """A checkpoint to spoil."""
    return shutil.copytree(TIED, tmp_path / "model")


@pytest.fixture
def chat_model(copy) -> Path:
    """The smallest model that can chat: 254 bytes and two control tokens."""
    return byte_tokenizer(copy, CHATML, LETTERS[:-2])


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> list[str]:
    """Flags for a tiny target with a tokenizer of bytes, and its drafter. They load at once."""
    target = new_target(258, context=2048)
    target_folder = byte_tokenizer(tmp_path_factory.mktemp("target"), CHATML)
    drafter_folder = tmp_path_factory.mktemp("drafter")
    (target_folder / "config.json").write_text(json.dumps(asdict(target.config)))
    tensors = {name: tensor.contiguous() for name, tensor in target.named_parameters()}
    save_file(tensors, target_folder / "model.safetensors")
    drafter = new_drafter(target, target_layer_inference=4, likeness=0.7)
    save_drafter(drafter, drafter_folder, torch.float32)
    flags = ["--model", str(target_folder), "--drafter", str(drafter_folder), "--device", "cpu"]
    return [*flags, "--dtype", "float32"]  # what the tests compute beside it
