"""Scores a drafter of the toy target, in every way that experiments/results shows.

`score` is what experiments/run.py calls for each drafter that it has trained. Its figures:

- The acceptance length of greedy chains of four, of greedy trees of sixteen tokens, and of such
  trees at temperature 1: new tokens for each pass of the target, over held-out prompts.
- How often the token drafted at each depth is right, if those before it were (`drafting`).
- The held-out losses, in one pass over the text.
- For a drafter without CA: what reading its own predictions costs it (`states`).

The files that it reads (PROMPTS, TEST) are written by experiments/run.py.
"""
from functools import partial
from pathlib import Path

import numpy as np
import torch

from experiments.ablations import LIMITS, Ablation
from experiments.evaluate import evaluate_drafting
from experiments.prompts import read_prompt_file
from llama import GenerationConfig, Llama, Sampling, generate, load_tokenizer
from moa import Draft, Drafter, DraftLimits
from plumbing.conversations import Conversations, TokenizedConversation
from speculate import LocalVerifier, WithDrafts, acceptance_length, answer
from train import EVALUATION_RUN, TrainConfig, evaluate, loss_mask, target_pass

TOY = Path("runs/toy")
TEST = Path("runs/test.jsonl")  # the target's own answers, which nobody was trained on
PROMPTS = Path("runs/prompts.jsonl")  # signatures that nobody was trained on
PROMPT_COUNT = 64
SEQ_LEN = 512
ANSWER_TOKENS = 96  # at most

NewVerifier = type[LocalVerifier]


def score(target: Llama, drafter: Drafter, ablation: Ablation) -> dict:
    """Return all figures of a drafter."""
    data = Conversations([str(TEST)], load_tokenizer(TOY), SEQ_LEN)
    sequences = list(data.read_usable(range(len(data))))
    scores = {"parameters": sum(parameter.numel() for parameter in drafter.parameters())}
    scores |= evaluate(drafter, sequences, TrainConfig(), ablation.max_depth)
    if ablation.max_depth == 1:  # there is no CA
        scores["states"] = score_states(target, drafter, sequences, ablation.new_verifier)
    scores["drafting"] = evaluate_drafting(drafter, sequences, ablation.new_verifier)
    measure = partial(measure_acceptance, target, drafter, ablation.new_verifier)
    scores["chain"] = measure(LIMITS["chain"], temperature=0.0)
    scores["tree"] = measure(LIMITS["tree"], temperature=0.0)
    scores["sampled_tree"] = measure(LIMITS["tree"], temperature=1.0)
    return scores


def measure_acceptance(
    target: Llama,
    drafter: Drafter,
    new_verifier: NewVerifier,
    limits: DraftLimits,
    temperature: float,
) -> float:
    """Answer the prompts with drafts. Returns new tokens for each pass of the target."""
    tokenizer = load_tokenizer(TOY)
    method = WithDrafts(target, drafter, limits, new_verifier=new_verifier)
    answers = []
    for seed, prompt in enumerate(read_prompt_file(PROMPTS)):
        ids = tokenizer.chat([{"role": "user", "content": prompt.turns[0]}])
        stop_ids = frozenset(tokenizer.stop_ids)
        config = GenerationConfig(ANSWER_TOKENS, temperature, seed=seed, stop_ids=stop_ids)
        answers.append(answer(method, ids, config))
        if answers[-1].interrupted:  # by Ctrl-C, which `answer` takes for the end of an answer
            raise KeyboardInterrupt
    return acceptance_length(answers)


# --- What predicted states cost a drafter without CA ---


@torch.no_grad()
def score_states(
    target: Llama,
    drafter: Drafter,
    sequences: list[TokenizedConversation],
    new_verifier: NewVerifier,
) -> dict:
    """Find what a drafter without CA loses by reading its own predictions while it drafts.

    Returns how often the token that it drafts at each depth is right after right ones: with states
    that it has "predicted", as always in a draft, and with the "true" ones of the target, which
    drafting does not have. Both are measured at the same places of the text.
    """
    predicted = []  # for each place, whether the token at each depth was right
    true = []
    for sequence in sequences:
        trained = loss_mask(sequence.answer)[:-EVALUATION_RUN]
        for start in trained.nonzero()[::EVALUATION_RUN, 0].tolist():
            text = sequence.tokens[:start + 1].tolist()  # its last token is the root
            # The right tokens.
            chain = list(generate(target, text, GenerationConfig(EVALUATION_RUN)))
            drafted = draft_along(target, drafter, text, chain, new_verifier)
            predicted.append([a == b for a, b in zip(drafted, chain)])
            drafted = predict_along(target, drafter, text, chain)
            true.append([a == b for a, b in zip(drafted, chain)])
    return {
        "predicted": np.mean(predicted, axis=0).tolist(),
        "true": np.mean(true, axis=0).tolist(),
    }


def draft_along(
    target: Llama, drafter: Drafter, text: list[int], chain: list[int], new_verifier: NewVerifier
) -> list[int]:
    """Draft one token at a time after a text, but go on with the chain's token each time.

    Returns the tokens drafted.
    """
    capacity = len(text) + len(chain)
    state = drafter.new_state(capacity, Sampling())
    verifier = new_verifier(target, drafter, capacity, Sampling())
    state.append_verified(verifier.prefill(text[:-1]).memory)
    draft = Draft(text[-1])
    drafted = []
    for node, token in enumerate(chain):
        features = state.step(draft, [node])  # (1, E)
        drafted.append(drafter.head.logits(features).argmax().item())
        draft.add(token, parent=node, probability=1.0)
    return drafted


def predict_along(
    target: Llama, drafter: Drafter, text: list[int], chain: list[int]
) -> list[int]:
    """Return the same drafted tokens, but with the target's true states: in one pass over the text
    and the chain."""
    tokens = torch.tensor([text + chain[:-1]])  # (1, T)
    states = target_pass(target, tokens, N=0)
    features = drafter.mix_attentions(tokens, states.kv, horizon=None)  # (1, T, E)
    return drafter.head.logits(features[0, len(text) - 1:]).argmax(-1).tolist()
