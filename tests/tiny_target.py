"""A tiny random target in a folder, and conversations: what training, synthesis and evaluation are
tested on."""
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import CHATML, byte_tokenizer

import llama
from app import train_command
from plumbing.journal import read_log

STOP = 257  # its stop token
CHAT = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "Döner?"},
    {"role": "assistant", "content": "Gladly, döner."},
]


def make_tiny_target(path: Path) -> Path:
    """A random Llama as Hugging Face would write it, and data. Its tokens are bytes, and about
    every twelfth that it writes is a stop token."""
    byte_tokenizer(path, CHATML)
    sizes = {
        "vocab_size": 258,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    write(path / "config.json", {"model_type": "llama", **sizes})
    write(path / "generation_config.json", {"eos_token_id": STOP})
    torch.manual_seed(0)
    model = llama.Llama(llama.Config(**sizes, head_dim=8))
    model.lm_head.weight.normal_(std=0.45)
    model.embed_tokens.weight[:, 0] = 4  # a constant, which the head makes the stop token's logit
    model.lm_head.weight[STOP, 0] = 1.8
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[name if name.startswith("lm_head") else f"model.{name}"] = parameter
    save_file(tensors, path / "model.safetensors")
    write(path / "data.jsonl", *counting(12))
    return path


def counting(count: int) -> list[dict]:
    """Conversations of which no two are alike."""
    texts = [", ".join(map(str, range(1, n))) for n in range(4, 4 + count)]
    return [{"data": [f"Count: {text[:9]}", text, "Thanks!", "Any time."]} for text in texts]


def write(path: Path, *lines) -> Path:
    """A file of lines, which are text or JSON."""
    with open(path, "w") as file:
        for line in lines:
            file.write((line if isinstance(line, str) else json.dumps(line)) + "\n")
    return path


# --- train.py on it ---


def train_with(*arguments) -> None:
    """train.py's command line, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *map(str, arguments)])
        train_command.main()


def flags(tiny: Path, *arguments) -> list[str]:
    sizes = "--device cpu --seq-len 96 --batch-size 3 --warmup 2 --mlp 32 --lsa-mlp 32"
    files = ["--model", str(tiny), "--data", str(tiny / "data.jsonl")]
    return [*files, *sizes.split(), *map(str, arguments)]


def error_of(command, capsys, *arguments) -> str:
    """The error of a command: one line, the last on stderr, and exit status 2."""
    with pytest.raises(SystemExit) as end:
        command(*arguments)
    message = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2
    assert ".py: error: " in message
    return message


def losses(out: Path) -> list[float]:
    return [record["loss"] for record in read_log(out) if "loss" in record]
