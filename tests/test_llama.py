"""Claims about the target: logits, cache, sampling, and the plain way to load a checkpoint."""
import json
import math
import os
import subprocess
import sys

import pytest
import torch
from conftest import GOLDEN, ROOT, TIED, UNTIED, close
from safetensors.torch import load_file
from tiny_models import ask, chi_square, new_target

import llama
from app.loading import load_model

SMOLLM2 = json.loads((GOLDEN / "smollm2_greedy.json").read_text())
TOKENS = torch.randint(0, 256, (3, 40), generator=torch.Generator().manual_seed(0))
both = pytest.mark.parametrize("folder", [UNTIED, TIED], ids=lambda path: path.name)


@pytest.fixture(scope="module")
def tiny() -> llama.Llama:
    return load_model(UNTIED)


def generate(model: llama.Llama, prompt: list[int], *config, **choices) -> list[int]:
    return list(llama.generate(model, prompt, llama.GenerationConfig(*config, **choices)))


# --- The model: logits, cache ---


@both
def test_logits_and_greedy_tokens_equal_the_reference(folder):
    model = load_model(folder)
    expected = load_file(folder / "expected.safetensors")
    close(model(expected["input_ids"]), expected["logits"])
    prompt = expected["greedy"][0, :16].tolist()
    answer = expected["greedy"][0, 16:].tolist()
    assert generate(model, prompt, len(answer)) == answer
    stop = answer[4]
    stopped = answer[:answer.index(stop) + 1]
    assert generate(model, prompt, len(answer), stop_ids={stop}) == stopped


@pytest.mark.parametrize("dtype, tolerance", [
    (torch.float32, 1e-5), (torch.bfloat16, 0.03), (torch.float16, 0.004),
], ids=str)
@both
def test_a_forward_in_chunks_through_a_used_cache_equals_an_uncached_one_in_float32(
        folder, dtype, tolerance):
    expected = load_model(folder)(TOKENS)
    model = load_model(folder, dtype=dtype)
    cache = model.new_cache(40, batch=3)

    def check(logits: torch.Tensor, start: int) -> None:
        assert logits.dtype == dtype
        difference = (logits.float() - expected[:, start:]).abs().max()
        assert difference < tolerance * expected.abs().max()

    for chunks in ([40], [1] * 40, [1, 7, 3, 2, 11, 1, 15], [37, 3]):
        cache.length = 0
        pieces = [model(piece, cache) for piece in TOKENS.split(chunks, dim=1)]
        check(torch.cat(pieces, dim=1), 0)
        cache.length = 12  # what follows the first 12 tokens is read again
        check(model(TOKENS[:, 12:], cache), 12)
        cache.length = 0
        model(TOKENS.flip(1), cache)  # leaves the keys and values of a different text behind


@pytest.mark.parametrize("path", [[0], [1, 3, 6], [0, 2, 4], []], ids=str)
def test_keeping_a_path_of_a_tree_equals_a_forward_over_only_that_path(tiny, path):
    parents = [-1, -1, 0, 1, 2, 0, 3]  # the parents of seven nodes, after a prompt of ten tokens
    prompt = TOKENS[:1, :10]
    tree = TOKENS[1:2, :7]
    rest = TOKENS[2:, :5]
    mask = torch.zeros(7, 17, dtype=torch.bool)
    mask[:, :10] = True
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] = mask[parent]
        mask[node, 10 + node] = True
    positions = mask.sum(dim=1) - 1
    linear_cache = tiny.new_cache(24)
    expected = tiny(torch.cat([prompt, tree[:, path], rest], dim=1), linear_cache)
    cache = tiny.new_cache(24)
    tiny(prompt, cache)
    logits = tiny.lm_head(tiny.hidden(tree, cache, positions, mask))
    end = 10 + len(path)
    close(logits[:, path], expected[:, 10:end])
    cache.keep_path(10, path)
    assert cache.length == end
    close(tiny(rest, cache), expected[:, end:])
    assert cache.length == linear_cache.length == end + 5
    close(cache.kv[:, :, :, :end + 5], linear_cache.kv[:, :, :, :end + 5])  # in the path's order


@pytest.mark.parametrize("length", [1, 512, 513, 1100])
def test_a_prompt_read_in_pieces_gives_the_cache_and_the_last_state_of_one_pass(length):
    model = new_target(50, context=1200)
    prompt = torch.randint(50, (1, length))
    whole_cache = model.new_cache(length)
    whole = model.hidden(prompt, whole_cache)
    cache = model.new_cache(length)
    last = llama.read_prompt(model, prompt[0].tolist(), cache)
    close(model.lm_head(last), model.lm_head(whole[0, -1]))
    close(cache.kv, whole_cache.kv)
    assert cache.length == length


def test_a_long_prompt_takes_memory_in_proportion_to_its_length():
    script = """if True:
        import resource, torch
        from tiny_models import new_target
        import llama
        model = new_target(50, context=9000)

        def megabytes(length):
            next(llama.generate(model, [1] * length, llama.GenerationConfig(1)))
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

        print(megabytes(600), megabytes(8192))
    """
    folders = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=os.environ | folders, capture_output=True, text=True)
    short, long = map(float, done.stdout.split())
    assert long - short < 100  # in one pass it would be 340: one mask of 8192 x 8192 has 67 MB


def test_a_cache_that_is_full_is_an_error_and_never_drops_a_token():
    model = new_target(16)
    cache = model.new_cache(3)
    model(torch.tensor([[1, 2, 3]]), cache)
    with pytest.raises(ValueError, match="the cache has 3 slots, too few for 4 tokens"):
        model(torch.tensor([[4]]), cache)


@pytest.mark.parametrize("golden", SMOLLM2, ids=lambda golden: golden["prompt"][:12])
def test_the_default_target_answers_as_the_reference_does(smollm2, golden):
    model, tokenizer = smollm2
    prompt_ids = tokenizer.chat(ask(golden["prompt"]))
    assert prompt_ids == golden["input_ids"]
    assert tokenizer.stop_ids == {2}
    assert tokenizer.decode(golden["greedy"]) == golden["text"]
    tokens = torch.tensor([prompt_ids + golden["greedy"]])
    hidden = model.hidden(tokens)[0, len(prompt_ids) - 1:-1]  # for every token of the answer
    logits = model.lm_head(hidden)
    assert logits.argmax(-1).tolist() == golden["greedy"]
    top = logits[0].topk(8)
    assert top.indices.tolist() == golden["top8_ids"]
    torch.testing.assert_close(top.values, torch.tensor(golden["top8_logits"]), atol=2e-3, rtol=0)


def test_the_default_target_writes_with_its_cache_what_the_reference_does(smollm2):
    model, tokenizer = smollm2
    golden = SMOLLM2[4]
    prompt_ids = tokenizer.chat(ask(golden["prompt"]))
    assert generate(model, prompt_ids, 9, stop_ids=tokenizer.stop_ids) == golden["greedy"][:9]


def test_the_target_reads_every_new_token_except_the_last(tiny):
    lengths = []
    hook = tiny.norm.register_forward_hook(lambda norm, x, output: lengths.append(output.shape[1]))
    answer = generate(tiny, [1, 2, 3], 6)
    assert lengths == [3, 1, 1, 1, 1, 1]
    lengths.clear()
    stopped = generate(tiny, [1, 2, 3], 6, stop_ids={answer[2]})
    hook.remove()
    assert lengths == [3] + [1] * (len(stopped) - 1)


# --- Sampling ---


def test_temperature_flattens_p_and_top_p_keeps_the_fewest_likeliest_tokens_that_reach_it():
    p = torch.tensor([0.05, 0.4, 0.15, 0.3, 0.1])
    close(llama.probabilities(p.log(), 2.0), p.sqrt() / p.sqrt().sum(), 1e-6)
    cases = {1e-6: [1], 0.39: [1], 0.41: [1, 3], 0.69: [1, 3], 0.71: [1, 2, 3]}
    for top_p, kept in cases.items():
        expected = torch.zeros(5)
        expected[kept] = p[kept] / p[kept].sum()
        close(llama.probabilities(p.log(), 1.0, top_p), expected, 1e-6)


@pytest.mark.parametrize("temperature", [0, 1e-45])
def test_at_temperature_0_or_next_to_it_the_likeliest_token_is_certain(temperature):
    logits = torch.tensor([0.05, 0.4, 0.15, 0.3, 0.1]).log()
    sampling = llama.GenerationConfig(temperature=temperature, top_p=0.5).new_sampling("cpu")
    assert sampling.temperature == 0
    assert llama.sample_next(logits, sampling) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("damage", [math.nan, math.inf])
def test_logits_that_overflowed_are_an_error(damage, temperature):
    sampling = llama.GenerationConfig(temperature=temperature).new_sampling("cpu")
    logits = torch.tensor([0.0, damage, 1.0])
    with pytest.raises(FloatingPointError):
        llama.sample_next(logits, sampling)


def test_tokens_are_distributed_as_the_softmax_of_the_logits():
    p = torch.tensor([0.35, 0.0, 0.25, 0.2, 0.1, 0.06, 0.03, 0.01])
    one_generator = []
    many_generators = []  # one for each draw, as each conversation has its own
    sampling = llama.GenerationConfig(temperature=1.0).new_sampling("cpu")
    for seed in range(4000):
        one_generator.append(llama.sample_next(p.log(), sampling))
        seeded = llama.GenerationConfig(temperature=1.0, seed=seed).new_sampling("cpu")
        many_generators.append(llama.sample_next(p.log(), seeded))
    for drawn in (torch.tensor(one_generator), torch.tensor(many_generators)):
        assert chi_square(drawn, p) < 22.5  # 6 degrees of freedom: one seed in a thousand is above
        hotter = llama.probabilities(p.log(), 1.2)
        assert chi_square(drawn, hotter) > 22.5  # a different temperature is noticed


def check_nucleus(kept: torch.Tensor, p: torch.Tensor, top_p: float) -> None:
    """Check that a token of p (V) is kept if and only if the likelier tokens do not reach top_p."""
    values, group = p.double().unique(return_inverse=True)  # in ascending order
    mass = torch.zeros_like(values).index_add(0, group, p.double())
    likelier = (mass.flip(0).cumsum(0).flip(0) - mass)[group]
    rounding = 1e-5  # the error of a sum over thousands of probabilities in float32
    assert (kept[likelier < top_p - rounding] > 0).all()
    assert (kept[likelier > top_p + rounding] == 0).all()
    expected = p * (kept > 0)
    close(kept, expected / expected.sum(), 1e-6)


@pytest.mark.parametrize("top_p", [0.001, 0.3, 0.9, 0.9999])
def test_a_token_is_in_the_nucleus_if_and_only_if_the_likelier_ones_do_not_reach_top_p(top_p):
    logits = torch.randn(3, 3000) * torch.tensor([[0.1], [2.0], [9.0]])  # from flat to peaked
    kept = llama.probabilities(logits, 1.0, top_p)
    for row in range(3):
        check_nucleus(kept[row], logits[row].softmax(-1), top_p)
    if top_p == 0.9:  # the search among a few of the likeliest is not always enough
        assert kept[0].count_nonzero() > 1024 > 64 > kept[2].count_nonzero()


def tied_logits() -> torch.Tensor:
    """Return three rows of 8192 logits in bfloat16. All logits of the first row tie, thousands of
    the second tie with each other, and few of the third."""
    levels = torch.randint(8, (8192,)) / 2
    logits = torch.stack([torch.zeros(8192), levels, torch.randn(8192) * 4])
    return logits.bfloat16()


@pytest.mark.parametrize("top_p", [0.001, 0.3, 0.9])
def test_whether_a_token_is_in_the_nucleus_depends_on_no_neighbor_and_on_no_order_of_ties(top_p):
    """`topk` leaves ties in an order that changes with its k, which depends on all rows."""
    logits = tied_logits()
    kept = llama.probabilities(logits, 0.8, top_p)
    for row in range(3):
        alone = llama.probabilities(logits[row], 0.8, top_p)
        assert torch.equal(alone > 0, kept[row] > 0)
        close(alone, kept[row], 1e-6)
        check_nucleus(alone, torch.softmax(logits[row].float() / 0.8, dim=-1), top_p)
    order = torch.randperm(8192)
    reordered = llama.probabilities(logits[:, order], 0.8, top_p)
    assert torch.equal(reordered > 0, kept[:, order] > 0)


def test_whether_64_tokens_reach_top_p_is_settled_in_the_same_way_beside_any_neighbor():
    """Rounding decides whether the 64 likeliest tokens reach a top_p that is just their sum. These
    64 are tried first, and more tokens if a neighbor needs more."""
    flat = torch.zeros(8192)
    for _ in range(50):
        logits = torch.randn(8192)
        logits[:64] += 6
        likeliest = torch.softmax(logits, dim=-1).topk(64).values
        for top_p in (float(likeliest.sum()), float(likeliest.cumsum(-1).max())):
            alone = llama.probabilities(logits, 1.0, top_p)
            beside_flat = llama.probabilities(torch.stack([logits, flat]), 1.0, top_p)
            assert torch.equal(alone > 0, beside_flat[0] > 0)


# --- The plain way to load a checkpoint ---


@pytest.mark.parametrize("folder", [UNTIED, ROOT / "weights/toy/target"], ids=str)
def test_the_chapter_by_itself_loads_a_folder_of_hugging_face(folder):
    plain = llama.load_llama(folder)
    checked = load_model(folder)
    assert plain.config == checked.config
    assert torch.equal(plain(TOKENS), checked(TOKENS))


def test_the_chapter_by_itself_refuses_rope_that_it_would_get_wrong():
    with pytest.raises(ValueError, match="llama3"):
        llama.load_llama(TIED)
