"""The benchmark reports what it measured, of one machine and of networks, in a table that fits."""
import contextlib
import io
import itertools
import json
import math
import multiprocessing
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from command_line import Done
from conftest import ROOT
from test_remote import FINGERPRINTS, serving_models
from tiny_models import PROMPT, WORDS, new_drafter, new_target, target_alone
from tqdm import tqdm

from app import client
from app.answers import Generation, Origin, TimedCycle
from app.client import open_channel
from app.exact import DetailedResult
from experiments import bench
from experiments.bench import (
    Contender,
    Turn,
    bench_prompts,
    measure_prompts,
    offline_quality,
    print_result,
    remote_contenders,
    summarize,
)
from experiments.prompts import Prompt, read_prompt_file
from experiments.tables import Column, format_markdown, print_rows
from llama import GenerationConfig
from moa import Draft, DraftLimits
from netsim import Link
from plumbing.errors import run_command


def command(program: ModuleType, *arguments: object) -> Done:
    """Run a program in this process, on a CPU."""
    status = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [program.__name__, "--device", "cpu", *map(str, arguments)])
        with contextlib.redirect_stdout(io.StringIO()) as out:
            with contextlib.redirect_stderr(io.StringIO()) as err:
                try:
                    run_command(program.main)
                except SystemExit as end:
                    status = end.code
    return Done(status, out.getvalue(), err.getvalue())


def fork(program: ModuleType, folder: Path, *arguments: object) -> multiprocessing.Process:
    """A program in a fork of this process, so that nothing is imported twice. What it prints is in
    the folder's files out and err."""

    def run() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & ignores it
        torch.set_num_threads(1)  # the others are not in a fork
        tqdm.set_lock(threading.RLock())  # the default is shared: a killed fork would keep it
        sys.argv = [program.__name__, "--device", "cpu", *map(str, arguments)]
        with open(folder / "out", "w") as sys.stdout, open(folder / "err", "w", 1) as sys.stderr:
            run_command(program.main)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def rows_of(done: Done) -> list[dict]:
    assert done.status == 0, done.err
    return json.loads(done.out)["rows"]


def assert_refused(done: Done, complaint: str) -> None:
    assert done.status == 2 and done.out == ""
    assert complaint in done.err.splitlines()[-1]


@pytest.fixture
def prompt_file(tmp_path):
    """A function that writes a prompt set, one record a line."""

    def write(*records: object) -> str:
        path = tmp_path / "prompts.jsonl"
        path.write_text("\n\n".join(map(json.dumps, records)) + "\n")
        return str(path)

    return write


# --- What is measured ---


def answer_of(seconds: float, tokens: list[int], calls: int) -> Generation:
    """An answer whose cost is known."""
    return Generation(
        PROMPT,
        tokens,
        [Origin.TARGET] * len(tokens),
        seconds=seconds,
        target_calls=calls,
        drafted=2 * calls,
        draft_seconds=seconds / 4,
    )


CONTENDERS = {name: Contender(None) for name in ("target", "chain x:y", "tree")}
ANSWERS = {
    "target": answer_of(4.0, [1, 2, 3, 4], calls=3),
    "chain x:y": answer_of(1.0, [1, 2, 3, 4], calls=1),  # a drafter's folder may be named so
    "tree": answer_of(2.0, [1, 2, 3, 5], calls=2),
}
TURNS = [Turn("a", 0, ANSWERS), Turn("a", 1, ANSWERS), Turn("b", 2, ANSWERS)]


def test_a_row_has_the_totals_of_its_category_and_method():
    rows = summarize(None, CONTENDERS, TURNS, GenerationConfig(4))
    names = [(row["category"], row["method"]) for row in rows]
    assert names == list(itertools.product(("a", "b", "overall"), CONTENDERS))
    by_name = dict(zip(names, rows))
    assert by_name["overall", "chain x:y"] == {
        "category": "overall",
        "method": "chain x:y",
        "tokens_per_second": 4,
        "speedup": 4,
        "speedup_quartiles": [4, 4],
        "acceptance_length": 3,
        "target_calls": 3,
        "new_tokens": 12,
        "drafted_per_call": 2,
        "draft_share": 0.25,
        "identical": 1,
    }
    assert by_name["a", "tree"]["new_tokens"] == 8
    assert by_name["a", "tree"]["speedup"] == 2 and by_name["a", "tree"]["identical"] == 0


def test_sampled_texts_need_not_be_identical():
    rows = summarize(None, CONTENDERS, TURNS, GenerationConfig(4, temperature=1.0))
    assert all("identical" not in row for row in rows)


def test_prompts_of_one_category_have_no_rows_twice():
    rows = summarize(None, CONTENDERS, TURNS[:2], GenerationConfig(4))
    assert [row["category"] for row in rows] == ["overall"] * 3


def turns_at(speedups: list[int]) -> list[Turn]:
    """A turn of each of several prompts, whose trees are so many times as fast as the target, and
    whose acceptance length is the same number. Each takes the target longer than the one before."""
    turns = []
    for i, speedup in enumerate(speedups):
        seconds = 6.0 * (i + 1)
        answers = {
            "target": answer_of(seconds, [1] * 7, calls=6),
            "tree": answer_of(seconds / speedup, [1] * 7, calls=6 // speedup),
        }
        turns.append(Turn("a", i, answers))
    return turns


def tree_row(turns: list[Turn]) -> dict:
    """The row of trees over all turns."""
    contenders = {name: Contender(None) for name in ("target", "tree")}
    return summarize(None, contenders, turns, GenerationConfig(7))[-1]


def test_an_interval_covers_its_figure_and_shrinks_with_more_prompts():
    few = tree_row(turns_at([1, 2, 3] * 3))
    many = tree_row(turns_at([1, 2, 3] * 30))
    for figure in ("speedup", "acceptance_length"):
        widths = []
        for row in (few, many):
            low, high = row[f"{figure}_interval"]
            assert 1 <= low < row[figure] < high <= 3
            widths.append(high - low)
        assert 2.5 < widths[0] / widths[1] < 4  # the root of ten is 3.2


def test_prompts_of_one_speed_up_have_a_point_as_their_interval():
    row = tree_row(turns_at([3] * 9))  # some take longer, but the target takes longer there, too
    assert row["speedup_interval"] == [pytest.approx(3)] * 2
    assert row["acceptance_length_interval"] == [pytest.approx(3)] * 2


def test_a_conversation_counts_as_one_prompt_in_an_interval():
    turns = turns_at([1, 2, 3, 3, 2, 1])
    again = []
    for turn in turns:
        again += [turn, turn]  # a second turn that is like the first
    for figure in ("speedup_interval", "acceptance_length_interval"):
        assert tree_row(again)[figure] == pytest.approx(tree_row(turns)[figure])


def test_too_few_prompts_have_no_interval():
    assert "speedup_interval" in tree_row(turns_at([1] * bench.MIN_PROMPTS))
    assert "speedup_interval" not in tree_row(turns_at([1] * (bench.MIN_PROMPTS - 1)))


def test_what_a_prompt_gave_is_the_sum_of_its_turns():
    first, second = turns_at([2, 3])
    assert measure_prompts([first, second._replace(prompt=first.prompt)], "tree") == [{
        "prompt": 0,
        "method": "tree",
        "new_tokens": 14,
        "target_calls": 3 + 2,
        "acceptance_length": 12 / 5,
        "seconds": 6 / 2 + 12 / 3,
    }]


def test_all_methods_go_on_after_the_targets_own_answer():
    target = new_target(16)
    asked = {"target": [], "other": []}

    class Asked(NamedTuple):
        name: str
        tokens: list[int]

        def cycles(self, prompt: list[int], config: GenerationConfig):
            asked[self.name].append(prompt)
            for token in self.tokens:
                result = DetailedResult([], token, update=None, draft=Draft(prompt[-1]))
                yield TimedCycle(result, [token], 0.0, 0.0)

    contenders = {
        "target": Contender(Asked("target", [1, 2])),
        "other": Contender(Asked("other", [3])),
    }
    prompts = [Prompt("a", ["one", "two"]), Prompt("b", ["three"])]
    context = target.config.max_position_embeddings
    turns = list(bench_prompts(WORDS, context, contenders, prompts, GenerationConfig(4)))
    assert [turn.category for turn in turns] == ["a", "a", "b"]  # the warm-up is none of them
    assert [turn.prompt for turn in turns] == [0, 0, 1]
    assert turns[0].answers["other"].tokens == [3]
    second = [{"content": "one"}, {"content": "1 2"}, {"content": "two"}]
    for prompts_of in asked.values():
        assert WORDS.chat(second) in prompts_of


def test_text_written_offline_is_judged_wherever_it_stands():
    target = new_target(16, context=128)
    alone = target_alone(target, 60)
    offline = (2, 3, 7)
    base = Generation(PROMPT, alone, [Origin.TARGET] * 60)
    ours = Generation(PROMPT, list(alone), [Origin.TARGET] * 60)
    ours.tokens[3] = (alone[3] + 1) % 16
    for i in offline:
        ours.origins[i] = Origin.UNVERIFIED
    log_p = target(torch.tensor([PROMPT + ours.tokens]))[0, len(PROMPT) - 1:].log_softmax(-1)
    nll = [-log_p[i, ours.tokens[i]].item() for i in offline]
    assert offline_quality(target, [ours], [base]) == {
        "agreement": 2 / 3,
        "perplexity": pytest.approx(math.exp(sum(nll) / 3), rel=1e-4),
    }


def test_over_networks_everything_is_measured_on_each_and_cut_once(monkeypatch):
    monkeypatch.setattr(bench.tqdm, "monitor_interval", 0)  # its thread is none of the server's
    monkeypatch.setattr(client, "MIN_TIMEOUT", 0.2)
    monkeypatch.setattr(client, "INITIAL_BACKOFF", 0.0)
    target = new_target(16)
    drafter = new_drafter(target)
    config = GenerationConfig(8)
    links = {"wan": Link(), "4g": Link(0.001)}
    with serving_models(target, drafter) as server:
        channels = {}
        for name, link in links.items():
            channels[name] = partial(
                open_channel, server.server_address, link, 0, fingerprints=FINGERPRINTS
            )
        contenders = remote_contenders(drafter, DraftLimits(4), channels, outage_after=2)
        turns = list(bench_prompts(WORDS, 64, contenders, [Prompt("a", ["one"])], config))
    rows = summarize(target, contenders, turns, config)
    kinds = ("api", "remote", "remote+lookup", "disconnected")
    expected = {f"{kind}:{name}" for kind, name in itertools.product(kinds, links)}
    assert {row["method"] for row in rows} == expected
    for row in rows:
        if row["method"].startswith("disconnected"):
            assert 0 < row["unverified_tokens"] <= 8 - 2
            assert 0 <= row["agreement"] <= 1 <= row["perplexity"]
        else:
            assert row["identical"] == 1 and "unverified_tokens" not in row
        assert row["bytes_up_per_token"] > 0 and row["bytes_down_per_token"] > 0
        assert row["round_trips_per_token"] > 0


# --- Tables ---


def test_a_table_fits_100_columns_explains_its_headings_and_ends_with_a_sentence(capsys):
    everything = {key: 12345.678 for key in bench.COLUMNS}
    everything |= {"speedup_interval": [10.25, 12.5], "acceptance_length_interval": [1.0, 2.0]}
    offline = everything | {"method": "disconnected:network", "speedup": 99.0}
    online = everything | {"method": "remote+lookup:network", "speedup": 1.5, "identical": 1.0}
    del online["unverified_tokens"], online["agreement"]
    rows = []
    for category in ("a long category", "overall"):
        rows += [{"category": category} | row for row in (online, offline)]
    print_result(rows)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    for column in bench.COLUMNS.values():
        assert f"{column.heading} " in "\n".join(line + " " for line in lines)
        assert any(line.startswith(column.heading) and column.meaning in line for line in lines)
    assert sum(line.startswith("a long category  remote+lookup:network") for line in lines) > 1
    assert sum(line.startswith("95%") for line in lines) == 1  # of two columns with one meaning


def test_a_table_says_which_texts_differ_and_that_nothing_was_faster(capsys):
    rows = summarize(None, CONTENDERS, TURNS[:1], GenerationConfig(4))
    rows.append(rows[0] | {"method": bench.UNPACKED, "speedup": 9.0})
    print_result(rows)
    out = capsys.readouterr().out
    assert "overall" not in out  # there is nothing else
    assert "Fastest: chain x:y, 4.00 times as fast as the target alone." in out
    assert "Not packed, the target alone is 9.00 times as fast as packed." in out
    assert "Some texts differ from those of the target alone: tree." in out
    print_result(rows[:1])
    assert "No method was faster than the target alone." in capsys.readouterr().out


def test_a_long_folder_loses_its_middle_in_a_table_and_keeps_its_end(capsys):
    rows = [{"method": "chain " + "folder/" * 20 + "end", "speed": 1}]
    print_rows(rows, ["method"], {"speed": Column("speed", "how fast"), "absent": Column("", "")})
    heading, row, _, legend = capsys.readouterr().out.splitlines()
    assert row.startswith("chain ") and "..." in row and row.endswith("/end      1")
    assert len(row) == len(heading) == 30 + 2 + 5
    assert legend == "speed  how fast"


def test_a_table_of_a_page_is_markdown():
    table = format_markdown(["", "speed"], [["a", "1"], ["b", "2"]])
    assert table == "|  | speed |\n|---|---|\n| a | 1 |\n| b | 2 |"


# --- The program ---


def test_the_program_reads_all_formats_and_leaves_out_a_prompt_that_is_too_long(
    checkpoint, prompt_file
):
    prompts = prompt_file(
        {"category": "text", "prompt": "Say hello."},
        {"category": "math", "turns": ["What is 2 + 2?", "And 3 + 3?"]},
        {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "."}]},
        {"category": "long", "prompt": "hello " * 400},
    )
    done = command(bench, prompts, *checkpoint, "--max-new-tokens", 12, "--json")
    assert "'hello hello" in done.err and "context" in done.err
    methods = ("target", "chain", "tree", "lookup", "tree+lookup")
    rows = [row for row in rows_of(done) if row["method"] != bench.UNPACKED]
    names = [(row["category"], row["method"]) for row in rows]
    assert names == list(itertools.product(("text", "math", "other", "overall"), methods))
    for row in rows:
        assert row["identical"] == 1
        assert row["acceptance_length"] >= 1
        assert row["target_calls"] < row["new_tokens"]
        assert row["tokens_per_second"] > 0
        assert row["speedup"] == 1 or row["method"] != "target"
    by_prompt = [row for row in json.loads(done.out)["prompts"] if row["method"] == "tree"]
    assert [row["prompt"] for row in by_prompt] == [0, 1, 2]
    overall = next(row for row in rows if (row["category"], row["method"]) == ("overall", "tree"))
    for key in ("new_tokens", "target_calls"):
        assert sum(row[key] for row in by_prompt) == overall[key]


def test_the_program_measures_several_drafters(checkpoint, prompt_file):
    model = checkpoint[:2]
    drafter = checkpoint[3]
    flags = ["--drafter", drafter, drafter + "/../" + Path(drafter).name, "--max-new-tokens", 4]
    rows = rows_of(command(bench, prompt_file({"prompt": "Hi"}), *model, *flags, "--json"))
    methods = [row["method"] for row in rows if row["method"] != bench.UNPACKED]
    expected = ["target"]
    for name in flags[1:3]:
        expected += [f"chain {name}", f"tree {name}"]
    assert methods == expected


def test_the_program_starts_a_server_of_its_own(checkpoint, prompt_file):
    flags = [*checkpoint, "--remote", "--latency", "1ms", "--max-new-tokens", 8, "--json"]
    rows = rows_of(command(bench, prompt_file({"prompt": "Hi"}), *flags))
    by_method = {row["method"]: row for row in rows}
    assert by_method["remote:link"]["identical"] == 1
    assert by_method["disconnected:link"]["unverified_tokens"] > 0


def test_the_default_prompt_set_has_several_prompts_of_each_of_six_categories():
    counts = Counter(prompt.category for prompt in read_prompt_file(bench.DEFAULT_PROMPTS))
    assert len(counts) == 6 and min(counts.values()) > 1


def test_the_test_set_has_eight_prompts_of_each_of_six_categories_and_none_of_the_default_set():
    default = read_prompt_file(bench.DEFAULT_PROMPTS)
    test = read_prompt_file(bench.DEFAULT_PROMPTS.with_name("test_prompts.jsonl"))
    counts = Counter(prompt.category for prompt in test)
    assert list(counts.values()) == [8] * 6
    turns = [turn for prompt in default + test for turn in prompt.turns]
    assert len(set(turns)) == len(turns)


def test_run_as_a_file_the_program_says_how_it_is_run():
    command = [sys.executable, "experiments/bench.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "python -m experiments.bench" in done.stderr


@pytest.fixture
def long_task(checkpoint, prompt_file) -> list[str]:
    """Flags that keep the program busy for minutes."""
    prompts = prompt_file(*({"category": f"c{i}", "prompt": "Hi"} for i in range(999)))
    return [prompts, *checkpoint, "--max-new-tokens", "8"]


def test_ctrl_c_ends_the_program_with_the_rows_of_the_prompts_that_are_done(long_task):
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.bench", *long_task],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )
    for line in process.stderr:
        if line.startswith("c1: "):
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert_has_the_rows_of_what_is_done(out, err)


def test_sigterm_ends_the_program_with_the_rows_of_the_prompts_that_are_done(long_task, tmp_path):
    (tmp_path / "err").touch()
    process = fork(bench, tmp_path, *long_task)
    while process.is_alive() and "\nc1: " not in (tmp_path / "err").read_text():
        time.sleep(0.01)
    process.terminate()
    process.join(60)
    assert process.exitcode == 128 + signal.SIGTERM
    out, err = [(tmp_path / name).read_text() for name in ("out", "err")]
    assert_has_the_rows_of_what_is_done(out, err)


def assert_has_the_rows_of_what_is_done(out: str, err: str) -> None:
    assert "stopped: the rows are of the prompts that were done" in err
    for category in ("c0", "c1", "overall"):
        assert re.search(rf"^{category} +tree\+lookup +\d", out, re.MULTILINE)
    assert not re.search("^c998 ", out, re.MULTILINE)


@pytest.mark.parametrize("arguments, complaint", [
    (["nowhere.jsonl", "--model", "some/model"], "nowhere.jsonl: "),
    (["--latency", "21ms"], "--latency needs --remote"),
    (["--remote", "--drafter", "a", "b"], "--remote takes one --drafter"),
    (["--draft-top-k", "1"], "--draft-top-k"),
    (["--drafter", "no/such/folder"], "no/such/folder"),
], ids=str)
def test_a_wrong_command_line_ends_in_one_line_and_status_2(arguments, complaint, checkpoint):
    done = command(bench, *checkpoint[:2], *arguments)
    assert_refused(done, complaint)
    assert done.err.count("\n") == 1
