"""Claims about the target: logits, cache, sampling, packed weights, and the command line."""
import io
import json
import math
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import GOLDEN, ROOT, TIED, UNTIED, case_name, close, raises
from safetensors.torch import load_file
from tiny_models import CHATML, LETTERS, LLAMA3, ask, byte_tokenizer, chi_square, new_target

import llama
from plumbing.errors import run_command

SMOLLM2 = json.loads((GOLDEN / "smollm2_greedy.json").read_text())
TOKENS = torch.randint(0, 256, (3, 40), generator=torch.Generator().manual_seed(0))
COMMAND = [sys.executable, ROOT / "llama.py", "--device", "cpu"]
both = pytest.mark.parametrize("folder", [UNTIED, TIED], ids=lambda path: path.name)


@pytest.fixture(scope="module")
def tiny() -> llama.Llama:
    return llama.load_model(UNTIED)


def generate(model: llama.Llama, prompt: list[int], *config, **choices) -> list[int]:
    return list(llama.generate(model, prompt, llama.GenerationConfig(*config, **choices)))


# --- The model: logits, cache, packed weights ---


@both
def test_logits_and_greedy_tokens_equal_the_reference(folder):
    model = llama.load_model(folder)
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
    expected = llama.load_model(folder)(TOKENS)
    model = llama.load_model(folder, dtype=dtype)
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
    read = []
    last = llama.read_in_pieces(model, prompt[0].tolist(), cache, read.append)
    close(model.lm_head(last), model.lm_head(whole[0, -1]))
    close(cache.kv, whole_cache.kv)
    assert cache.length == length
    assert read == [*range(512, length, 512), length]


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


@pytest.mark.parametrize("dtype, tolerance", [
    (torch.float32, 2e-5), (torch.bfloat16, 0.05),
], ids=str)
@both
def test_a_packed_model_gives_the_same_logits_for_any_number_of_tokens(folder, dtype, tolerance):
    model = llama.load_model(folder, dtype=dtype)
    packed = llama.pack(llama.load_model(folder, dtype=dtype))
    if llama.can_pack(torch.ones(1, dtype=dtype)):  # otherwise the model stays as it is
        unpacked = {name for name, _ in packed.named_parameters() if "norm" not in name}
        assert unpacked == {"embed_tokens.weight"}
    cache = model.new_cache(200)
    packed_cache = packed.new_cache(200)
    for count in (*range(1, 18), 1, 40):
        expected = model(TOKENS[:1, :count], cache)
        logits = packed(TOKENS[:1, :count], packed_cache)
        assert logits.dtype == dtype
        assert not packed_cache.kv[:, :, :, packed_cache.length:].any()  # no padding
        assert (logits - expected).abs().max() < tolerance * expected.abs().max()


def test_a_model_whose_dtype_cannot_be_packed_says_once_that_its_texts_may_differ(capsys):
    model = llama.load_model(UNTIED, dtype=torch.float16)
    assert llama.pack(model) is model
    assert type(model) is llama.Llama
    warning = "no exact kernels were found on this CPU: texts may differ\n"
    assert capsys.readouterr().err == warning


def test_positions_without_a_mask_and_a_mask_without_positions_are_refused():
    positions = torch.tensor([0])
    mask = torch.ones(1, 1, dtype=torch.bool)
    for model in (llama.load_model(UNTIED), llama.pack(llama.load_model(UNTIED))):
        for given in ({"positions": positions}, {"mask": mask}):
            with pytest.raises(AssertionError, match="give both positions and a mask, or neither"):
                model.hidden(TOKENS[:1, :1], model.new_cache(8), **given)


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


def test_a_model_without_its_first_layers_computes_the_others(tiny):
    last = llama.load_model(UNTIED, last=1)
    assert list(last.layers)[:2] == [None, None]
    calls = []
    hook = tiny.layers[2].register_forward_hook(
        lambda layer, args, kwargs, output: calls.append((args, kwargs, output)), with_kwargs=True
    )
    logits = tiny(TOKENS)
    hook.remove()
    ((args, kwargs, output),) = calls
    close(last.layers[2](*args, **kwargs), output)
    close(last.lm_head(last.norm(output)), logits)


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
def test_logits_that_overflowed_are_an_input_error_that_names_other_types(damage, temperature):
    sampling = llama.GenerationConfig(temperature=temperature).new_sampling("cpu")
    logits = torch.tensor([0.0, damage, 1.0])
    raises("--dtype bfloat16 or float32", llama.sample_next, logits, sampling)


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


# --- Command line ---


def test_a_tokenizer_with_more_tokens_than_the_model_is_an_input_error(copy):
    byte_tokenizer(copy, LLAMA3)
    raises("the model's 256 embeddings", llama.load_target, copy, "cpu", torch.float32)


@pytest.fixture
def chat_model(copy) -> Path:
    """The smallest model that can chat: 254 bytes and two control tokens."""
    return byte_tokenizer(copy, CHATML, LETTERS[:-2])


def test_a_piped_prompt_with_json_gives_one_object_with_its_tokens_even_with_stderr_closed(
        chat_model):
    model = llama.load_model(chat_model)
    tokenizer = llama.load_tokenizer(chat_model)
    expected = generate(model, tokenizer.chat(ask("Hi!")), 8, temperature=1.0, seed=3)
    flags = ["--max-new-tokens", "8", "--temperature", "1", "--seed", "3", "--json"]
    command = ["sh", "-c", '"$@" 2>&-', "sh", *COMMAND, "--model", chat_model, *flags]
    prompt = "Hi!\n"  # as `echo` ends a line
    done = subprocess.run(command, capture_output=True, text=True, input=prompt)
    assert done.returncode == 0
    answer = json.loads(done.stdout)
    assert answer["tokens"] == expected
    assert answer["text"] == tokenizer.decode(expected)
    assert answer["new_tokens"] == 8
    assert answer["target_calls"] == 7
    assert answer["seconds"] >= answer["prompt_seconds"] > 0
    assert answer["tokens_per_second"] > 0
    assert answer["stopped"] == "max-new-tokens"
    assert answer["prompt_tokens"] == len(tokenizer.chat(ask("Hi!")))
    assert answer["seed"] == 3


def test_text_goes_to_stdout_in_its_encoding_and_statistics_to_stderr(
        chat_model, monkeypatch, capsys):
    tokenizer = llama.load_tokenizer(chat_model)
    model = llama.load_model(chat_model)
    tokens = generate(model, tokenizer.chat(ask("Hi")), 9, temperature=100.0)
    text = tokenizer.decode(tokens)
    assert not text.isascii()
    stdout = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    flags = ["--model", str(chat_model), "--prompt", "Hi", "--max-new-tokens", "9"]
    flags += ["--temperature", "100", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["llama.py", *flags])
    run_command(llama.main)
    stdout.flush()
    assert stdout.buffer.getvalue() == f"{text}\n".encode("ascii", "replace")
    assert "new tokens 9, seconds" in capsys.readouterr().err


def test_a_reader_of_stdout_who_leaves_ends_the_answer_without_a_message(chat_model):
    flags = ["--model", chat_model, "--prompt", "Hi"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*COMMAND, *flags], **pipes)
    process.stdout.close()
    _, errors = process.communicate()
    assert errors == b""
    assert process.returncode == 1


def refusal(flags: list, monkeypatch, capsys) -> str:
    """Return the line of error with which the command ends. Check that its exit status is 2."""
    monkeypatch.setattr(sys, "argv", ["llama.py", "--device", "cpu", *map(str, flags)])
    with pytest.raises(SystemExit) as caught:
        run_command(llama.main)
    out, err = capsys.readouterr()
    assert caught.value.code == 2
    assert out == ""
    assert re.fullmatch("llama.py: error: .*\n", err)
    return err


def test_without_a_prompt_on_a_terminal_one_line_says_how_to_give_one(monkeypatch, capsys):
    ours, theirs = pty.openpty()
    with open(theirs) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        error = refusal([], monkeypatch, capsys)
    os.close(ours)
    assert error == "llama.py: error: no prompt: give one with --prompt TEXT, or pipe one in\n"


def test_help_shows_the_defaults(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["llama.py", "--help"])
    with pytest.raises(SystemExit):
        llama.main()
    text = " ".join(capsys.readouterr().out.split())
    defaults = {
        "--max-new-tokens": "256",
        "--temperature": "0.0",
        "--top-p": "1.0",
        "--seed": "0",
        "--model": "smollm2",
    }
    for flag, default in defaults.items():
        assert re.search(rf"{flag} [A-Z_]+ [^()]*\(default: {default}\)", text)


@pytest.mark.parametrize("flags, culprit", [
    (["--temperature", "-1"], "--temperature: invalid value '-1': expected 0 to 100"),
    (["--temperature", "nan"], "--temperature"),
    (["--top-p", "0"], "--top-p"),
    (["--max-new-tokens", "0"], "--max-new-tokens: invalid value '0': expected at least 1"),
    (["--seed", "x"], "--seed: invalid int value: 'x'"),
    (["--device", "abacus"], "abacus"),
    (["--device", "cuda:99"], "cuda:9"),
    (["--model", "two\nlines"], "two lines: no such file or folder, and no such model"),
], ids=case_name)
def test_a_bad_flag_ends_in_one_line_and_status_2(flags, culprit, capsys, monkeypatch):
    assert culprit in refusal(["--prompt", "Hi", *flags], monkeypatch, capsys)
