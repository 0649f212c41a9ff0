"""What a GPU would mind, claimed without one: nothing mixes devices, drafting reads no more back than it must, and what a CUDA
graph would record holds wherever it is replayed.

The device is made up. Its tensors say that they are on `made` and are computed on the CPU; to mix them with others is an
error, as on a GPU, and every time values are read back from there is counted. No other test asks for that device.
"""
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import llama
import moa
import speculate
import train
from llama import Llama
from moa import Drafter, Shape
from speculate import Remote, Settings, answer
from test_remote import serving
from test_speculate import fixed, new_drafter, new_target

aten = torch.ops.aten
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


class Made(torch.Tensor):
    """A tensor on the made-up device; `inner` is where its values are."""

    waits = 0  # times that values were read back
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.size(), strides=inner.stride(), dtype=inner.dtype,
                                                   storage_offset=inner.storage_offset(), device="made:0")
        made.inner = inner
        return made

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        target = kwargs.pop("device", None)
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        made = {id(x.inner): x for x in leaves if isinstance(x, Made)}
        copies = operator in (aten.copy_.default, aten._to_copy.default)
        stray = [x for x in leaves if isinstance(x, torch.Tensor) and not isinstance(x, Made) and x.dim() > 0]
        if stray and not copies:
            raise RuntimeError(f"{operator}: a tensor {tuple(stray[0].shape)} on the CPU, others on the made-up device")
        comes_back = operator is aten._to_copy.default and target is not None and target.type == "cpu"
        cls.waits += comes_back or operator is aten._local_scalar_dense.default
        result = operator(*bare(args), **bare(kwargs))
        if comes_back:
            return result
        return torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: made[id(x)] if id(x) in made else Made(x), result)


def bare(arguments):
    return torch.utils._pytree.tree_map_only(Made, lambda x: x.inner, arguments)


_setup_privateuseone_for_python_backend("made")  # now, as tests are collected: the first backward pass counts the devices


@pytest.fixture(scope="module")
def device():
    torch.made.get_amp_supported_dtype = lambda: [torch.bfloat16]
    library = torch.library.Library("aten", "IMPL")

    def implement(name: str, function) -> None:
        library.impl(name, function, "PrivateUse1")

    implement("empty.memory_format", lambda size, dtype=None, **_: Made(torch.empty(size, dtype=dtype)))
    implement("empty_strided", lambda size, stride, dtype=None, **_: Made(torch.empty_strided(size, stride, dtype=dtype)))
    for name in ("arange", "arange.start", "arange.start_step"):
        implement(name, lambda *ends, dtype=None, **_: Made(torch.arange(*ends, dtype=dtype)))
    implement("_copy_from", lambda source, to, non_blocking=False: Made(to.inner.copy_(source)))
    yield torch.device("made:0")  # while the library lives


@pytest.fixture(autouse=True)
def what_it_lacks(monkeypatch) -> None:
    """Random numbers of its own, and inference mode (`answer` has that from its decorator: hence its __wrapped__)."""
    class Generator(torch.Generator):
        def __new__(cls, device=None):
            return super().__new__(cls, "cpu")

    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)


def models(device, **choices) -> tuple[Llama, Drafter]:
    target = new_target(20).to(device)
    return target, new_drafter(target, **choices).to(device)


@torch.no_grad()
def answer_on(device, settings: Settings, remote: bool = False, **choices) -> speculate.Generation:
    target, drafter = models(device, **choices)
    if not remote:
        return answer.__wrapped__(target, drafter, PROMPT, settings)
    with serving(target, drafter) as server:
        return answer.__wrapped__(target, drafter, PROMPT, settings, remote=Remote("127.0.0.1", server.server_address[1]))


CHOICES = [{}, {"target_layer_inference": 2}, {"use_layer_self_attention": False}, {"use_cross_attention": False},
           {"draft_vocabulary": tuple(range(0, 20, 2))}]


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("shape", [Shape(3), Shape(3, breadth=2, nodes=6)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_stays_on_its_device_and_says_what_it_says_on_a_cpu(device, choices, shape, temperature):
    settings = fixed(shape, 8, temperature=temperature, top_p=0.9, lookup=(3,))
    assert answer_on(device, settings, **choices).tokens == answer_on("cpu", settings, **choices).tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("choices", CHOICES[:2])
def test_so_does_the_remote_mode(device, choices, temperature):
    settings = fixed(Shape(3), 8, temperature=temperature)
    assert len(answer_on(device, settings, remote=True, **choices).tokens) == 8


@pytest.mark.parametrize("shape", [Shape(3), Shape(3, breadth=2, nodes=6)])
def test_a_cycle_at_temperature_0_reads_values_back_once_a_level_and_for_the_verdict(device, shape, monkeypatch):
    levels = []
    step = speculate.Drafting.step
    monkeypatch.setattr(speculate.Drafting, "step", lambda *args: levels.append(args) or step(*args))
    Made.waits = 0
    calls = answer_on(device, fixed(shape, 8)).figures.target_calls
    assert calls > 0 and Made.waits == len(levels) + calls + 2  # 2: whether the prompt's states are finite, and its verdict


@pytest.mark.parametrize("shape", [Shape(3), Shape(3, breadth=2, nodes=6)])
def test_a_cycle_above_0_reads_values_back_once_a_level_and_for_each_draft_that_is_judged(device, shape, monkeypatch):
    levels, judged = [], []
    step, rand = speculate.Drafting.step, torch.rand
    monkeypatch.setattr(speculate.Drafting, "step", lambda *args: levels.append(args) or step(*args))
    monkeypatch.setattr(torch, "rand", lambda *args, **choices: judged.append(args) or rand(*args, **choices))
    Made.waits = 0
    calls = answer_on(device, fixed(shape, 8, temperature=1.0)).figures.target_calls
    assert len(judged) >= calls > 0
    assert Made.waits <= len(levels) + len(judged) + calls + 2  # one of a verdict's: its last token


@pytest.mark.parametrize("choices", CHOICES)
def test_training_stays_on_its_device_and_learns_what_it_learns_on_a_cpu(device, choices):
    def losses(device) -> list[float]:
        torch.manual_seed(0)
        target = new_target(20).to(device)
        drafter = new_drafter(target, **choices).to(device).requires_grad_(True)
        args = Namespace(seed=0, run_length=(5, 15), horizons=2, micro_batch_size=2, dtype="float32", freeze_lsa=False,
                         kl_weight=0.1, feature_weight=1.0)
        batch = [train.Sequence(torch.arange(size) % 20, torch.arange(size) >= 6) for size in (18, 25, 21)]
        optimizer, scaler = train.Optimizer(drafter.parameters(), "muon"), torch.amp.GradScaler("cpu", enabled=False)
        before = train.train_batch(drafter, batch, 0, args, train.Worker(0, 1), scaler)
        optimizer.step(1e-2, scaler)
        return [*before, train.evaluate(drafter, batch, args)["held_out_loss"]]

    assert losses(device) == pytest.approx(losses("cpu"), rel=1e-4)


class Recorder:
    """In place of llama.captured: records a function's operations where its inputs have shapes that are new, and replays them
    ever after, as a CUDA graph would: a number that was read off the first inputs, or a size, stays what it was.
    """

    def __init__(self):
        self.recordings = {}

    def __call__(self, function, device):
        def run(*inputs):
            key = function, *(x.shape for x in torch.utils._pytree.tree_leaves(inputs))
            if key not in self.recordings:
                self.recordings[key] = make_fx(lambda *inputs: function(*inputs))(*inputs)
            return self.recordings[key](*inputs)
        return run


@pytest.fixture
def recorder(monkeypatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(llama, "captured", recorder)
    monkeypatch.setattr(moa, "captured", recorder)
    return recorder


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("shape, temperature", [(Shape(3), 0.0), (Shape(3, breadth=2, nodes=6), 1.0),
                                                (Shape(6, breadth=8, nodes=60), 0.0)])
def test_recorded_passes_replayed_behind_other_text_give_the_same_answer(recorder, choices, shape, temperature):
    settings = fixed(shape, 40, temperature=temperature, top_p=0.9, lookup=(3,))
    expected = answer_on("cpu", settings, **choices).tokens
    target, drafter = models("cpu", **choices)
    assert answer.__wrapped__(target.capture(), drafter.capture(), PROMPT, settings).tokens == expected
    recorded = dict(recorder.recordings)
    assert 0 < len(recorded) <= 3 * len(llama.SIZES)
    assert answer.__wrapped__(target, drafter, PROMPT, settings).tokens == expected
    assert recorder.recordings == recorded


def test_so_does_the_target_alone_up_to_the_last_position_of_its_cache_and_context(recorder):
    target, _ = models("cpu")
    prompt = [i % 20 for i in range(target.config.max_position_embeddings - 30)]
    expected = list(llama.generate(target, prompt, 30))
    assert list(llama.generate(target.capture(), prompt, 30)) == expected and len(recorder.recordings) == 1
    with pytest.raises(llama.InputError, match="context"):
        list(llama.generate(target, prompt, 32))
    cache = target.new_cache(12)
    target.hidden(torch.tensor([prompt[:10]]), cache)
    with pytest.raises(llama.InputError, match="cache is full"):
        target.hidden(torch.tensor([prompt[:3]]), cache)


def test_a_cache_takes_the_place_of_one_that_is_gone_and_starts_empty(recorder):
    target, _ = models("cpu")
    target.capture()
    first, second = target.new_cache(50), target.new_cache(300)
    first.kv.fill_(1.0)
    places = {first.kv.data_ptr(), second.kv.data_ptr()}
    del first, second
    third, fourth, fifth = (target.new_cache(50) for _ in range(3))
    assert {third.kv.data_ptr(), fourth.kv.data_ptr()} == places and fifth.kv.data_ptr() not in places
    assert not third.kv.any() and not fourth.kv.any() and (fourth.capacity, fourth.length) == (50, 0)
    slots = {slot.data_ptr() for slot in third.slots}
    assert slots == {layer.data_ptr() for layer in third.kv}


@pytest.mark.parametrize("capacity", [1, 2112, 2113, 4160, 8256])
def test_a_cache_has_room_for_padding(recorder, capacity):
    target, _ = models("cpu")
    assert target.capture().new_cache(capacity).kv.shape[3] - capacity >= llama.SIZES[-1]


def test_warming_up_meets_every_size_that_answers_have(recorder):
    target, drafter = models("cpu")
    target.config = replace(target.config, max_position_embeddings=65)
    speculate.warm_up.__wrapped__(target.capture(), drafter.capture())
    assert len(recorder.recordings) == 3 * len(llama.SIZES)
    for shape in (Shape(3), Shape(3, breadth=2, nodes=6), Shape(6, breadth=8, nodes=60)):
        answer.__wrapped__(target, drafter, PROMPT, fixed(shape, 40))
    assert len(recorder.recordings) == 3 * len(llama.SIZES)


@pytest.mark.parametrize("choices", CHOICES[:2])
def test_a_server_has_warmed_up_before_it_listens(recorder, choices):
    settings, (target, drafter) = fixed(Shape(3), 40), models("cpu", **choices)
    expected = answer.__wrapped__(target, drafter, PROMPT, settings).tokens
    client = models("cpu", **choices)  # which captures nothing
    target.config = replace(target.config, max_position_embeddings=65)
    with serving(target.capture(), drafter.capture()) as server:
        recorded = len(recorder.recordings)
        remote = Remote("127.0.0.1", server.server_address[1])
        assert answer.__wrapped__(*client, PROMPT, settings, remote=remote).tokens == expected
        assert recorded == len(recorder.recordings)
