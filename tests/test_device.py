"""Nothing mixes devices: claimed without a GPU, on a made-up device.

Its tensors say that they are on `made` and are computed on the CPU; to mix them with others is an error, as on a GPU.
"""
from argparse import Namespace

import pytest
import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import train
from llama import Llama
from moa import Drafter, TreeConfig
from netsim import Channel, Link, Network
from speculate import Generation, GenerationConfig, answer
from test_remote import serving_models
from test_speculate import new_drafter, new_target

aten = torch.ops.aten
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
CHAIN, TREE = TreeConfig(depth=3), TreeConfig(depth=3, top_k=2, total_tokens=6)
CHOICES = [{}, {"target_layer_inference": 2}, {"use_layer_self_attention": False}, {"use_cross_attention": False},
           {"draft_vocabulary": tuple(range(0, 20, 2))}]


class Made(torch.Tensor):
    """A tensor on the made-up device; `inner` is where its values are."""

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
        result = operator(*bare(args), **bare(kwargs))
        if operator is aten._to_copy.default and target is not None and target.type == "cpu":
            return result
        known = lambda x: made[id(x)] if id(x) in made else Made(x)  # noqa: E731, for operations in place
        return torch.utils._pytree.tree_map_only(torch.Tensor, known, result)


def bare(arguments):
    return torch.utils._pytree.tree_map_only(Made, lambda x: x.inner, arguments)


_setup_privateuseone_for_python_backend("made")  # while tests are collected: the first backward pass counts the devices


@pytest.fixture(scope="module")
def device():
    torch.made.get_amp_supported_dtype = lambda: [torch.bfloat16]
    library = torch.library.Library("aten", "IMPL")
    factories = {
        "empty.memory_format": lambda size, dtype=None, **_: Made(torch.empty(size, dtype=dtype)),
        "empty_strided": lambda size, stride, dtype=None, **_: Made(torch.empty_strided(size, stride, dtype=dtype)),
        "_copy_from": lambda source, to, non_blocking=False: Made(to.inner.copy_(source)),
        **dict.fromkeys(("arange", "arange.start", "arange.start_step"),
                        lambda *ends, dtype=None, **_: Made(torch.arange(*ends, dtype=dtype)))}
    for name, function in factories.items():
        library.impl(name, function, "PrivateUse1")
    yield torch.device("made:0")  # while the library lives


@pytest.fixture(autouse=True)
def what_it_lacks(monkeypatch) -> None:
    """Random numbers of its own, and inference mode (`answer` has that from its decorator: hence its __wrapped__)."""
    class Generator(torch.Generator):
        def __new__(cls, device=None):
            return super().__new__(cls, "cpu")

    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)


def models(device, **choices) -> tuple[Llama, Drafter]:
    return (target := new_target(20).to(device)), new_drafter(target, **choices).to(device)


@torch.no_grad()
def answer_on(device, tree: TreeConfig, temperature: float, remote: bool = False, **choices) -> Generation:
    both, config = models(device, **choices), GenerationConfig(6, temperature, 0.9)
    if not remote:
        return answer.__wrapped__(*both, PROMPT, config, tree, lookup=True)
    with serving_models(*both) as server:
        channel = Channel(server.server_address, "", Network(Link()))
        return answer.__wrapped__(*both, PROMPT, config, tree, channel=channel)


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("tree, temperature", [(CHAIN, 0.0), (CHAIN, 1.0), (TREE, 0.0), (TREE, 1.0)])
@pytest.mark.parametrize("remote", [False, True])
def test_speculation_stays_on_its_device_and_gives_the_tokens_of_a_cpu(device, choices, tree, temperature, remote):
    ours, expected = (answer_on(d, tree, temperature, remote, **choices) for d in (device, "cpu"))
    assert ours.tokens == expected.tokens and len(ours.tokens) == 6
    assert ours.stats["drafted"] > 0 and not ours.unverified() and not ours.disconnected


def test_the_made_up_device_is_strict(device):
    with pytest.raises(RuntimeError, match="on the CPU, others on the"):
        models(device)[0].run_layers(torch.zeros(1, 3, 16), range(1))


@pytest.mark.parametrize("choices", CHOICES)
def test_training_stays_on_its_device_and_learns_what_it_learns_on_a_cpu(device, choices):
    args = Namespace(seed=0, run_length=(5, 15), horizons=2, micro_batch_size=2, dtype="float32", kl_weight=1.0,
                     feature_weight=1.0, memory_weight=0.1)
    batch = [train.Sequence(torch.arange(size) % 20, torch.arange(size) >= 6) for size in (18, 25, 21)]

    def losses(device) -> list[float]:
        drafter = models(device, **choices)[1].requires_grad_(True)
        before = train.compute_gradients(drafter, batch, 0, args)
        for optimizer in train.make_optimizers(drafter, "muon"):
            optimizer.step()
        return [*before, train.evaluate(drafter, batch, args)["held_out_loss"]]
    assert losses(device) == pytest.approx(losses("cpu"), rel=1e-4)
