"""The drafters that experiments/results compares: how each is made, and which experiment has it.

All have 0.37 million parameters, within a hundredth, so that none is better for being larger.
Where a part is missing, the MLPs of the others are wider. All are trained in the same way, for
6,400 updates: ten minutes on a fast core, twenty on a slow one. A name that ends in "-quarter",
say, is a drafter with a training of its own that is a quarter as long, at whose end the learning
rate is 0.
"""
import itertools
from dataclasses import asdict, dataclass
from typing import Iterable

from torch import Tensor

from app.training import DrafterSizes, RunConfig
from experiments.ablations import ABLATIONS, FULL, Ablation
from moa import Drafter

UPDATES = 6400
LENGTHS = {
    "eighth": UPDATES // 8,
    "quarter": UPDATES // 4,
    "half": UPDATES // 2,
    "double": UPDATES * 2,
}
SEEDS = (0, 1, 2)
SEQ_LEN = 512


# --- A drafter that sees less ---


class LastLayerDrafter(Drafter):
    """LSA sees the keys and values of the target's last layer in place of every other's."""

    def build_memory(self, pieces: Iterable[Tensor]) -> Tensor:
        return super().build_memory(kv[:, :, -1:].expand_as(kv) for kv in pieces)


# --- Recipes ---


@dataclass(frozen=True)
class Recipe:
    """How a drafter is made. By default as in the paper, with N = 0."""

    drafter: Ablation = FULL
    mlp: int | None = None  # width of the MLPs; None: the default, in the paper's proportions
    tli: int = 0  # layers of the target to reuse, N
    run_length: tuple[int, int] = (5, 15)  # of mock cycles, see train.py
    kl_weight: float = 0.1
    feature_weight: float = 1.0
    text: str = "own"  # runs/TEXT.jsonl
    judged_offline: bool = False  # whether what it writes alone is scored, too

    def sizes(self) -> DrafterSizes:
        return DrafterSizes(tli=self.tli, mlp=self.mlp)

    def training(self, updates: int, seed: int) -> RunConfig:
        return RunConfig(
            updates=updates, batch_size=2, micro_batch_size=2, seq_len=SEQ_LEN,
            run_length=self.run_length, kl_weight=self.kl_weight,
            feature_weight=self.feature_weight, lr=4e-3, schedule="cosine", warmup=20,
            optimizer="muon", seed=seed, eval_every=400, save_every=1000,
        )

    def describe(self, updates: int, seed: int) -> dict:
        """Return all that makes a drafter this one, for the files of results."""
        return {
            "kind": self.drafter.kind.__name__,
            "text": self.text,
            **asdict(self.sizes()),
            **asdict(self.training(updates, seed)),
            "run_length": list(self.run_length),  # as JSON has it
        }


RECIPES = {
    "full": Recipe(judged_offline=True),
    "no-lsa": Recipe(ABLATIONS["no-lsa"], mlp=352),
    "no-ca": Recipe(ABLATIONS["no-ca"]),
    "neither": Recipe(ABLATIONS["neither"], mlp=352),
    "eagle": Recipe(ABLATIONS["eagle"], mlp=768),
    "last-layer": Recipe(FULL._replace(kind=LastLayerDrafter)),
    "run-1": Recipe(run_length=(1, 1)),
    "run-2-8": Recipe(run_length=(2, 8)),
    "run-unbounded": Recipe(run_length=(100_000, 100_000)),
    "n-1": Recipe(tli=1, judged_offline=True),
    "n-2": Recipe(tli=2, judged_offline=True),
    "n-4": Recipe(tli=4, judged_offline=True),
    "kl-only": Recipe(feature_weight=0.0),
    "smooth-l1-only": Recipe(kl_weight=0.0),
    "others-text": Recipe(text="others"),
    "own-250": Recipe(text="own-250"),
}


def find_recipe(name: str) -> tuple[Recipe, int]:
    """Return a recipe, and for how many updates: of "eagle-quarter", EAGLE's and a quarter."""
    drafter, _, length = name.rpartition("-")
    if length in LENGTHS:
        return RECIPES[drafter], LENGTHS[length]
    return RECIPES[name], UPDATES


# --- Experiments: the drafters of each ---

PARTS = ["full", "neither", "eagle", "no-lsa", "no-ca"]
EXPERIMENTS = {
    "on_policy": ["full", "run-1", "run-unbounded"],
    "parts": PARTS,
    "memory": ["full", "last-layer", "no-lsa"],
    "reused_layers": ["full", "n-1", "n-2", "n-4"],
    "losses": ["full", "kl-only", "smooth-l1-only"],
    "text": ["full", "others-text", "own-250"],
    "longer": [
        "full-eighth", "full-quarter", "full-half", "full",
        "neither-eighth", "neither-quarter", "neither-half", "neither",
    ],
    "longest": ["full", "full-double", "neither-double"],
    "on_policy_early": [
        "full-quarter", "run-1-quarter", "run-unbounded-quarter", "run-2-8-quarter",
    ],
    "parts_early": [f"{name}-quarter" for name in PARTS],
    "reused_layers_early": ["full-quarter", "n-1-quarter", "n-2-quarter", "n-4-quarter"],
    "losses_early": ["full-quarter", "kl-only-quarter", "smooth-l1-only-quarter"],
    "text_early": ["full-quarter", "others-text-quarter", "own-250-quarter"],
    # Of parts_early and on_policy_early, made again from scratch with later code.
    "repeated": [
        "full-quarter", "neither-quarter", "eagle-quarter", "no-lsa-quarter", "run-1-quarter",
        "run-unbounded-quarter",
    ],
}
ONE_SEED = {"text"}  # three took too long
TIMED = {  # what a cycle costs hardly depends on training: so a short one is enough for `cost`
    "cost": [f"{name}-eighth" for name in PARTS],
    "cost_longest": ["full-double", "neither-double"],
}


def jobs_of(experiment: str) -> list[tuple[str, int]]:
    """Return the drafters that an experiment needs, each with a seed."""
    drafters = (EXPERIMENTS | TIMED).get(experiment, [])  # `network` needs none
    seeds = SEEDS[:1] if experiment in ONE_SEED else SEEDS
    return list(itertools.product(drafters, seeds))
