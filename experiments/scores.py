"""Scores a drafter of the toy target, in every way that experiments/results shows.

`score` is what experiments/run.py calls for each drafter that it has trained. Its figures:

- The acceptance length of greedy chains of four, of greedy trees of sixteen tokens, and of such
  trees at temperature 1: new tokens for each pass of the target, over held-out prompts.
- How often the token drafted at each depth is right, if those before it were (`drafting`).
- The held-out losses, in one pass over the text.

The files that it reads (PROMPTS, TEST) are written by experiments/run.py.
"""
from functools import partial
from pathlib import Path

from app.answers import acceptance_length, answer
from app.evaluation import evaluate
from experiments.ablations import LIMITS, Ablation, WithAblation
from experiments.evaluate import evaluate_drafting
from experiments.prompts import read_prompt_file
from llama import GenerationConfig, Llama
from moa import Drafter, DraftLimits
from plumbing.conversations import Conversations
from plumbing.tokenizer import load_tokenizer
from train import TrainConfig

TOY = Path("runs/toy")
TEST = Path("runs/test.jsonl")  # the target's own answers, which nobody was trained on
PROMPTS = Path("runs/prompts.jsonl")  # signatures that nobody was trained on
PROMPT_COUNT = 64
SEQ_LEN = 512
ANSWER_TOKENS = 96  # at most


def score(target: Llama, drafter: Drafter, ablation: Ablation) -> dict:
    """Return all figures of a drafter."""
    data = Conversations([str(TEST)], load_tokenizer(TOY), SEQ_LEN)
    sequences = [data[index] for index in range(len(data))]
    parameters = drafter.trained_parameters().values()
    scores = {"parameters": sum(parameter.numel() for parameter in parameters)}
    losses = evaluate(drafter, sequences, TrainConfig())
    scores |= {name: value for name, value in losses.items() if name.startswith("held_out")}
    scores["drafting"] = evaluate_drafting(
        drafter, sequences, ablation.new_verifier, ablation.new_state
    )
    measure = partial(measure_acceptance, target, drafter, ablation)
    scores["chain"] = measure(LIMITS["chain"], temperature=0.0)
    scores["tree"] = measure(LIMITS["tree"], temperature=0.0)
    scores["sampled_tree"] = measure(LIMITS["tree"], temperature=1.0)
    return scores


def measure_acceptance(
    target: Llama, drafter: Drafter, ablation: Ablation, limits: DraftLimits, temperature: float
) -> float:
    """Answer the prompts with drafts. Returns new tokens for each pass of the target."""
    tokenizer = load_tokenizer(TOY)
    method = WithAblation(target, drafter, limits, ablation)
    answers = []
    for seed, prompt in enumerate(read_prompt_file(PROMPTS)):
        ids = tokenizer.chat([{"role": "user", "content": prompt.turns[0]}])
        stop_ids = frozenset(tokenizer.stop_ids)
        config = GenerationConfig(ANSWER_TOKENS, temperature, seed=seed, stop_ids=stop_ids)
        answers.append(answer(method, ids, config))
    return acceptance_length(answers)
