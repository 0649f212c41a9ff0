"""Makes a toy target from nothing but the Python that runs it.

A drafter for a real target takes days to train, one for this target minutes: so drafters can be
compared. The toy is a Llama of 1.7 million parameters that writes functions in the style of
Python's own library. A question is the signature of a function, its answer the function:

    def close(self):    ->    def close(self):
                                  self.file.close()

    python -m experiments.toy runs/toy --dtype bfloat16     # minutes on two cores
    python -m experiments.toy runs/toy --resume             # after any interruption

The folder then holds the target as a Hugging Face directory, its training text (functions.jsonl)
and text that it never saw (held_out.jsonl). The one in weights/toy was made in this way. This file
is also the shortest example of how a language model is trained here.

Shapes: B windows, T tokens, V tokens of the vocabulary.
"""
import ast
import json
import random
import sysconfig
import textwrap
from argparse import Namespace
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Iterator

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from app.training import Optimizers, choose_optimizer
from llama import Config, Llama
from plumbing.devices import DTYPES, choose_dtype
from plumbing.errors import InputError, run_command
from plumbing.files import atomic_write
from plumbing.flags import Parser, number, path, positive_int
from plumbing.journal import Journal, end_stopped_run, find_run, lock_folder, read_settings
from plumbing.processes import say
from plumbing.records import find_records, parse_record, read_messages
from plumbing.signals import StopSignals
from plumbing.tokenizer import Tokenizer, read_hugging_face_tokenizer

NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}  # folders
FUNCTION_CHARACTERS = 1500  # longer functions, which would not fit in a window, are left out
HELD_OUT_FUNCTIONS = 200
CONTROLS = ["<|im_start|>", "<|im_end|>"]  # of ChatML: ids 0 and 1; the latter ends a turn
CHATML_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
HEAD_DIM = 32
WINDOW = 512  # tokens of a training example
WINDOWS = 4  # of an update
PEAK_LR = 6e-3  # the highest learning rate


@dataclass(frozen=True)
class ToyConfig:
    """The toy's sizes, and how it is trained."""

    layers: int = 8
    width: int = 128
    heads_per_kv_head: int = 2
    vocabulary: int = 2048
    updates: int = 2000
    dtype: str = "float32"
    seed: int = 0
    eval_every: int = 200
    save_every: int = 50


# --- The text ---


def library_functions() -> dict[str, str]:
    """Return the functions and methods of Python's standard library: {signature: source}.

    There is one for each signature, so that a question has one answer.
    """
    library = Path(sysconfig.get_path("stdlib"))
    functions = {}
    for file in sorted(library.rglob("*.py")):
        if NOT_LIBRARY.intersection(file.relative_to(library).parts):
            continue
        text = file.read_text(encoding="utf-8")
        lines = text.split("\n")  # as `ast` counts them (splitlines() also splits at form feeds)
        for node in find_functions(ast.parse(text)):
            source = textwrap.dedent("\n".join(lines[node.lineno - 1:node.end_lineno]))
            if len(source) <= FUNCTION_CHARACTERS:
                functions[f"def {node.name}({ast.unparse(node.args)}):"] = source
    return functions


def find_functions(module: ast.Module) -> Iterator[ast.FunctionDef]:
    """Yield a module's functions, and the methods of all classes in it.

    Functions inside a function depend on it, and of those inside an `if` there may be two. Both
    are left out.
    """
    for owner in ast.walk(module):
        if isinstance(owner, (ast.Module, ast.ClassDef)):
            for node in owner.body:
                if isinstance(node, ast.FunctionDef):
                    yield node


def write_functions(folder: Path, vocabulary: int, seed: int) -> None:
    """Write functions.jsonl, held_out.jsonl, a tokenizer that is trained on the former, and a chat
    template.

    train.py reads such lines as conversations, and the benchmark reads them as prompts.
    """
    functions = list(library_functions().items())
    random.Random(seed).shuffle(functions)
    lines = []
    for signature, source in functions:
        lines.append(json.dumps({"prompt": signature, "data": [signature, source]}) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "held_out.jsonl").write_text("".join(lines[:HELD_OUT_FUNCTIONS]))
    (folder / "functions.jsonl").write_text("".join(lines[HELD_OUT_FUNCTIONS:]))
    sources = [source for _, source in functions[HELD_OUT_FUNCTIONS:]]
    tokenizer = tokenizers.ByteLevelBPETokenizer()  # GPT-2's kind (Radford et al. 2019)
    tokenizer.train_from_iterator(sources, vocabulary, special_tokens=CONTROLS)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHATML_TEMPLATE)


def read_windows(path: Path, tokenizer: Tokenizer) -> Tensor:
    """Join a file's conversations into one text, and return all of its windows.

    One window begins at each token. The result is a view, (windows, WINDOW + 1).
    """
    ids = []
    for record in find_records(path):
        messages = read_messages(parse_record(record.text))
        ids += tokenizer.chat(messages, add_generation_prompt=False)[:WINDOW]
    return torch.tensor(ids).unfold(0, WINDOW + 1, 1)


# --- The model ---


def make_target(vocab_size: int, config: ToyConfig, device: str) -> Llama:
    """Return a Llama with random weights."""
    heads = config.width // HEAD_DIM
    sizes = Config(
        vocab_size=vocab_size,
        hidden_size=config.width,
        intermediate_size=8 * config.width // 3,  # three matrices: as large as two of 4 * width
        num_hidden_layers=config.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // config.heads_per_kv_head,
        head_dim=HEAD_DIM,
        rope_theta=10000.0,
        max_position_embeddings=2 * WINDOW,
        tie_word_embeddings=True,
    )
    torch.manual_seed(config.seed)
    model = Llama(sizes)
    nn.init.normal_(model.embed_tokens.weight, std=0.02)  # it is the LM head as well
    return model.to(device).requires_grad_(True)


def save_target(folder: Path, model: Llama) -> None:
    """Write a Hugging Face directory, which `load_model` reads, in bfloat16."""
    config = {"model_type": "llama", "eos_token_id": 1, **asdict(model.config)}
    weights = {f"model.{name}": p.bfloat16() for name, p in model.named_parameters()}
    with atomic_write(folder / "config.json") as part:
        part.write_text(json.dumps(config))
    with atomic_write(folder / "model.safetensors") as part:
        save_file(weights, part)


# --- Training ---


def next_token_loss(model: Llama, windows: Tensor, dtype: str) -> Tensor:
    """Return the mean cross-entropy of each next token. windows: (B, WINDOW + 1)."""
    windows = windows.to(model.device)
    with torch.autocast(model.device.type, DTYPES[dtype], enabled=dtype != "float32"):
        logits = model(windows[:, :-1])  # (B, WINDOW, V)
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def evaluate_target(model: Llama, held_out: Tensor, dtype: str) -> dict:
    losses = [next_token_loss(model, window, dtype).item() for window in held_out.split(1)]
    return {"held_out_loss": sum(losses) / len(losses)}


def learning_rate(update: int, updates: int) -> float:
    """Rise from 0 to PEAK_LR in the first fiftieth, then fall on a straight line to 0."""
    done = (update + 1) / (updates + 1)
    return float(np.interp(done, [0, 0.02, 1], [0, PEAK_LR, 0]))


def make_toy(folder: Path, config: ToyConfig, device: str = "cpu", resume: bool = False) -> None:
    """Make a toy target in a folder, or go on with one. Raises InputError."""
    resumes = find_run(folder, resume)
    if not resumes:
        write_functions(folder, config.vocabulary, config.seed)
    tokenizer = read_hugging_face_tokenizer(folder)
    training = read_windows(folder / "functions.jsonl", tokenizer)
    held_out = read_windows(folder / "held_out.jsonl", tokenizer)[::WINDOW]
    model = make_target(tokenizer.backend.get_vocab_size(), config, device)
    # Muon for the layers' matrices, and AdamW for the embeddings, as is usual beside Muon.
    other = [model.embed_tokens.weight, model.norm.weight]
    optimizer = Optimizers(
        choose_optimizer(model.layers.parameters(), "muon"), choose_optimizer(other, "adamw")
    )
    parameters = dict(model.named_parameters())
    save_model = partial(save_target, folder, model)
    journal = Journal(folder, parameters, optimizer, save_model, asdict(config))
    with lock_folder(folder):
        if resumes:
            journal.resume(config.updates, may_differ={"eval_every", "save_every"})
        else:
            journal.begin()
        train_target(model, optimizer, training, held_out, journal, config)


def train_target(
    model: Llama,
    optimizer: Optimizers,
    training: Tensor,
    held_out: Tensor,
    journal: Journal,
    config: ToyConfig,
) -> None:
    """Train up to config.updates. training, held_out: windows, (.., WINDOW + 1).

    Raises InputError if the loss is not finite, and SystemExit after a signal to stop.
    """
    with (
        StopSignals("stopping after this update, or evaluation") as signals,
        tqdm(desc="updates", initial=journal.done, total=config.updates) as progress,
    ):
        for update in range(journal.done, config.updates):
            began = perf_counter()
            # The draws depend on seed and update alone, so that --resume repeats them.
            draws = np.random.default_rng((config.seed, update))
            windows = training[draws.integers(len(training), size=WINDOWS)]  # (B, WINDOW + 1)
            loss = next_token_loss(model, windows, config.dtype)
            if not loss.isfinite():
                raise InputError(
                    f"update {update + 1}: the loss is not finite; begin again with another "
                    "--seed, in another folder"
                )
            loss.backward()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(update, config.updates)
            optimizer.step()
            model.zero_grad()
            speed = windows.numel() / (perf_counter() - began)

            done = update + 1
            is_last = done == config.updates
            journal.log(done, {"loss": loss.item(), "tokens_per_second": speed})
            progress.set_postfix_str(f"loss {loss.item():.3f}, {speed:.0f} tokens/s")
            progress.update()
            if is_last or done % config.eval_every == 0:
                scores = evaluate_target(model, held_out, config.dtype)
                journal.log(done, scores)
                say(f"update {done}: held-out loss {scores['held_out_loss']:.3f}")
            if signals.received or is_last or done % config.save_every == 0:
                journal.save(done)
            if signals.received:
                break
    if journal.done < config.updates:
        end_stopped_run(journal.done, signals)


# --- The command line ---


def parse_arguments() -> Namespace:
    parser = Parser(
        prog="python -m experiments.toy",
        description="Make a toy target from the source code of Python's own library.",
        examples="python -m experiments.toy runs/toy --dtype bfloat16\n"
        "python -m experiments.toy runs/toy --resume",
    )
    add = parser.add_argument
    count = partial(add, type=positive_int)
    add("folder", type=path, metavar="DIR", help="where to write it")
    count("--layers", help="(default: %(default)s)")
    count("--width", help="(default: %(default)s)")
    count("--heads-per-kv-head", metavar="HEADS", help="(default: %(default)s)")
    # At least all bytes and two control tokens.
    add("--vocabulary", type=number(int, 258), metavar="COUNT", help="(default: %(default)s)")
    count("--updates", help="(default: %(default)s)")
    add("--dtype", choices=("float32", "bfloat16"), help="of products (default: %(default)s)")
    add("--seed", type=number(int, 0, 2**63 - 1), help="(default: %(default)s)")
    count("--eval-every", metavar="UPDATES", help="(default: %(default)s)")
    count("--save-every", metavar="UPDATES", help="(default: %(default)s)")
    add("--device", default="cpu", help="cpu, cuda or mps (default: %(default)s)")
    add("--resume", action="store_true",
        help="go on with the one in DIR; flags not given are as they were")
    parser.set_defaults(**asdict(ToyConfig()))
    args = parser.parse_args()
    if args.resume:
        parser.set_defaults(**read_settings(args.folder))
        args = parser.parse_args()
    unit = HEAD_DIM * args.heads_per_kv_head
    if args.width % unit != 0:
        parser.error(f"--width: expected a multiple of {unit}, not {args.width}")
    return args


def main() -> None:
    args = parse_arguments()
    choose_dtype(args.device, args.dtype)
    names = [field.name for field in fields(ToyConfig)]
    config = ToyConfig(**{name: getattr(args, name) for name in names})
    make_toy(args.folder, config, args.device, args.resume)


if __name__ == "__main__":
    run_command(main)
