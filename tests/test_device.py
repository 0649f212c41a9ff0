"""Nothing mixes devices: claimed on a GPU or, without one, on a made-up device.

The made-up device's tensors say that they are on `made` and are computed on the CPU. To mix them
with others is an error, as on a GPU.
"""
from dataclasses import replace

import pytest
import torch
from conftest import case_name
from test_client import channel_to
from test_remote import serving_models
from tiny_models import new_drafter, new_target
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import speculate
from app import answers, server, training
from app.answers import Generation, OnServer, WithDrafts
from app.display import Trace
from app.evaluation import evaluate
from experiments.along_text import Text
from experiments.arms import ARMS, WithArm, new_drafter_of
from experiments.batching import Batch, ChainBatch, answer_all
from experiments.compare import score_chains
from experiments.evaluate import evaluate_drafting
from experiments.side_by_side import Entrant, make_update
from llama import GenerationConfig, Llama
from moa import Drafter, DraftLimits
from plumbing.conversations import TokenizedConversation
from plumbing.tokenizer import load_tokenizer

aten = torch.ops.aten
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
CHAIN = DraftLimits(depth=3)
TREE = DraftLimits(depth=3, top_k=2, total_tokens=6)
CHOICES = [
    {},
    {"target_layer_inference": 2},
    {"draft_vocabulary": tuple(range(0, 20, 2))},
]


# --- The made-up device ---


class Made(torch.Tensor):
    """A tensor on the made-up device; `inner` is where its values are."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            dtype=inner.dtype,
            storage_offset=inner.storage_offset(),
            device="made:0",
        )
        made.inner = inner
        return made

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        target = kwargs.pop("device", None)
        found = []
        arguments = bare(args, found)
        named_arguments = {name: bare(value, found) for name, value in kwargs.items()}
        if operator not in (aten.copy_.default, aten._to_copy.default):
            check_devices(operator, found)
        result = operator(*arguments, **named_arguments)
        if operator is aten._to_copy.default and target is not None and target.type == "cpu":
            return result
        return wrap(result, found)


def bare(argument, found: list[torch.Tensor]):
    """The same with the values of made-up tensors. All its tensors are added to `found`."""
    if isinstance(argument, (list, tuple)):
        return [bare(item, found) for item in argument]
    if isinstance(argument, torch.Tensor):
        found.append(argument)
    return argument.inner if isinstance(argument, Made) else argument


def check_devices(operator, tensors: list[torch.Tensor]) -> None:
    """Raises RuntimeError for a tensor on the CPU that is not a mere number."""
    for tensor in tensors:
        if not isinstance(tensor, Made) and tensor.dim() > 0:
            shape = tuple(tensor.shape)
            raise RuntimeError(
                f"{operator}: a tensor {shape} on the CPU, others on the made-up device"
            )


def wrap(result, arguments: list[torch.Tensor]):
    """The result of an operation on these arguments, on the made-up device."""
    if isinstance(result, (list, tuple)):
        return type(result)(wrap(item, arguments) for item in result)
    if not isinstance(result, torch.Tensor):
        return result
    for argument in arguments:
        if isinstance(argument, Made) and argument.inner is result:  # an operation in place
            return argument
    return Made(result)


GPU = torch.accelerator.current_accelerator(check_available=True)
if GPU is None:
    # While tests are collected: the first backward pass counts the devices.
    _setup_privateuseone_for_python_backend("made")
    # PyTorch asks for it at any moment.
    torch.made.get_amp_supported_dtype = lambda: [torch.bfloat16]


def empty(size, dtype=None, **_) -> Made:
    return Made(torch.empty(size, dtype=dtype))


def empty_strided(size, stride, dtype=None, **_) -> Made:
    return Made(torch.empty_strided(size, stride, dtype=dtype))


def copy_from(source, to: Made, non_blocking: bool = False) -> Made:
    return Made(to.inner.copy_(source))


def arange(*ends, dtype=None, **_) -> Made:
    return Made(torch.arange(*ends, dtype=dtype))


@pytest.fixture(scope="module")
def made_up_device():
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    library.impl("_copy_from", copy_from, "PrivateUse1")
    for name in ("arange", "arange.start", "arange.start_step"):
        library.impl(name, arange, "PrivateUse1")
    yield torch.device("made:0")  # while the library lives


@pytest.fixture
def device(request, monkeypatch):
    if GPU is not None:
        return GPU
    provide_what_it_lacks(monkeypatch)
    return request.getfixturevalue("made_up_device")


class CPUGenerator(torch.Generator):
    def __new__(cls, device=None):
        return super().__new__(cls, "cpu")


def provide_what_it_lacks(monkeypatch) -> None:
    """Random numbers of its own, and inference mode, which some functions have from a decorator."""
    monkeypatch.setattr(torch, "Generator", CPUGenerator)
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)
    for owner, name in (
        (speculate, "speculate"),
        (answers, "speculate"),
        (server.TargetSession, "make_next"),
    ):
        monkeypatch.setattr(owner, name, torch.no_grad()(getattr(owner, name).__wrapped__))


def models(device, **choices) -> tuple[Llama, Drafter]:
    target = new_target(20).to(device)
    drafter = new_drafter(target, **choices).to(device)
    return target, drafter


def test_the_device_is_strict(device):
    target, _ = models(device)
    with pytest.raises(RuntimeError, match="on the CPU, others on the|to be on the same device"):
        target.lm_head(torch.zeros(1, 3, 16))


# --- What stays on its device ---


@torch.no_grad()
def answer_on(
    device, where: str, limits: DraftLimits, temperature: float, choices: dict
) -> Generation:
    """where: "here", with drafts from lookup too and a trace; by an arm of a comparison; or from a
    "server" in this process."""
    target, drafter = models(device, **choices)
    config = GenerationConfig(6, temperature, top_p=0.9)
    if where == "server":
        with serving_models(target, drafter) as server:
            method = OnServer(lambda prompt: channel_to(server), drafter, limits)
            return answers.answer(method, PROMPT, config)
    if where in ARMS:
        drafter = new_drafter_of(ARMS[where], target, 24, None, seed=0)
        return answers.answer(WithArm(target, drafter, limits), PROMPT, config)
    trace = Trace(load_tokenizer("toy"), config.new_sampling(device), as_json=True)
    method = WithDrafts(target, drafter, limits, lookup=True)
    generation = Generation(PROMPT)
    for cycle in generation.record(method.cycles(PROMPT, config)):
        trace.emit(cycle)
    return generation


SAMPLED_TREE = (TREE, 1.0)
DRAFTS = [(CHAIN, 0.0), (CHAIN, 1.0), (TREE, 0.0), SAMPLED_TREE]  # and a temperature
PLACES = [("here", {}, *drafts) for drafts in DRAFTS]
PLACES += [("server", {}, *drafts) for drafts in DRAFTS]
for each in CHOICES[1:]:
    PLACES += [("here", each, *SAMPLED_TREE), ("server", each, *SAMPLED_TREE)]
for name in ("last-layer", "no-memory", "eagle", "eagle-3"):
    PLACES += [(name, {}, CHAIN, 0.0), (name, {}, *SAMPLED_TREE)]


@pytest.mark.parametrize("where, choices, limits, temperature", PLACES, ids=case_name)
def test_speculation_stays_on_its_device_and_gives_the_tokens_of_a_cpu(
        device, where, choices, limits, temperature):
    ours = answer_on(device, where, limits, temperature, choices)
    expected = answer_on("cpu", where, limits, temperature, choices)
    if temperature == 0 or device.type == "made":  # a GPU has random numbers of its own
        assert ours.tokens == expected.tokens
    assert len(ours.tokens) == 6
    assert ours.drafted > 0 and ours.unverified == 0 and ours.outage == ""


@torch.no_grad()
def batch_on(device) -> list[list[int]]:
    target, drafter = models(device, target_layer_inference=1)
    batch = ChainBatch(target, drafter, rows=2, capacity=16, K=3)
    ended = answer_all(batch, [PROMPT, PROMPT[:3], PROMPT[2:]], GenerationConfig(4))
    return [conversation.tokens for conversation in sorted(ended, key=lambda c: c.key)]


def test_a_batch_of_conversations_stays_on_its_device_too(device):
    assert batch_on(device) == batch_on("cpu")


@torch.no_grad()
def target_batch_on(device) -> list[list[int]]:
    """Without a drafter: two greedy answers and, in between, one that is sampled."""
    target, _ = models(device)
    batch = Batch(target, rows=3, capacity=16)
    batch.add_all([
        ("first", PROMPT, GenerationConfig(4)),
        ("second", PROMPT[:3], GenerationConfig(4, temperature=1.0, top_p=0.9)),
        ("third", PROMPT[2:], GenerationConfig(4)),
    ])
    ended = {}
    while batch.requests:
        ended |= {conversation.key: conversation.tokens for conversation in batch.step()}
    return [ended[key] for key in ("first", "second", "third")]


def test_a_batch_without_a_drafter_reads_its_prompts_together_and_samples_together(device):
    first, sampled, third = target_batch_on(device)
    expected_first, _, expected_third = target_batch_on("cpu")
    assert (first, third) == (expected_first, expected_third)
    assert len(sampled) == 4 and all(0 <= token < 20 for token in sampled)


def some_conversations() -> list[TokenizedConversation]:
    batch = []
    for size in (18, 25, 21):
        positions = torch.arange(size)
        batch.append(TokenizedConversation(positions % 20, positions >= 6))
    return batch


def losses_on(device, choices: dict) -> list[float]:
    """Those of an update and, after it, those of an evaluation."""
    config = training.RunConfig(micro_batch_size=2, kl_weight=1.0)
    batch = some_conversations()
    _, drafter = models(device, **choices)
    parameters = drafter.trained_parameters().values()
    for parameter in parameters:
        parameter.requires_grad_(True)
    optimizer = training.choose_optimizer(parameters, "muon")
    losses = training.make_update(drafter, optimizer, batch, 0, 1e-3, config)
    scores = evaluate(drafter, batch, config)
    return [losses["loss"], losses["kl"], scores["held_out_loss"]]


@pytest.mark.parametrize("choices", CHOICES)
def test_training_stays_on_its_device_and_learns_what_it_learns_on_a_cpu(device, choices):
    expected = losses_on("cpu", choices)
    assert losses_on(device, choices) == pytest.approx(expected, rel=1e-4)


def compared_on(device, names: list[str], vocabulary: torch.Tensor | None) -> list[float]:
    """Of each arm of a comparison, passes along texts and the loss of an update."""
    target = new_target(20).to(device)
    if vocabulary is not None:
        vocabulary = vocabulary.to(device)
    entrants = []
    for name in names:
        arm = replace(ARMS[name], noise=0.0)  # each device would draw other numbers
        drafter = new_drafter_of(arm, target, 24, vocabulary, seed=0)
        optimizer = training.choose_optimizer(drafter.trained_parameters().values(), "muon")
        entrants.append(Entrant(name, arm, target, drafter, 1e-3, optimizer))
    (tokens, answer), (other_tokens, _), _ = some_conversations()
    texts = [Text(tokens, 6, temperature=0.0), Text(other_tokens, 6, temperature=1.0)]
    numbers = []
    for scores in score_chains(entrants, texts, "float32").values():
        numbers += scores["passes"]
    config = training.RunConfig(updates=4, micro_batch_size=1, schedule="cosine")
    losses = make_update(entrants, [TokenizedConversation(tokens, answer)], 0, config)
    return numbers + [float(loss) for loss in losses.values()]


@pytest.mark.parametrize("names, vocabulary", [
    (list(ARMS), None),
    (["full", "eagle-3"], torch.arange(0, 20, 2)),
], ids=["all arms", "half of the tokens"])
def test_a_comparison_stays_on_its_device_and_finds_what_it_finds_on_a_cpu(
        device, names, vocabulary):
    expected = compared_on("cpu", names, vocabulary)
    assert compared_on(device, names, vocabulary) == pytest.approx(expected, rel=1e-4)


@torch.no_grad()
def scores_on(device) -> dict:
    _, drafter = models(device)
    positions = torch.arange(18)
    return evaluate_drafting(drafter, [TokenizedConversation(positions, positions >= 6)])


def test_an_evaluation_of_real_drafting_stays_on_its_device_too(device):
    assert scores_on(device) == scores_on("cpu")
