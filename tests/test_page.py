"""The page and the picture of an answer: they show the trace, all of it and nothing else."""
import json
import re
import subprocess
import sys
import xml.etree.ElementTree
from html.parser import HTMLParser

import pytest
from command_line import command
from conftest import ROOT
from test_bench import assert_refused
from test_bench import command as run_here

from experiments import page
from plumbing.errors import InputError

HOSTILE = '</script><b>"&\u2028\x1b[2J'
SHOWN = '</script><b>"&\u2028\\x1b[2J'  # a control character is named


class Scripts(HTMLParser):
    """Collects the tags of a page, and the text of each of its scripts, as a browser reads them."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.tags.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script" and self.cdata_elem == "script":
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def trace_lines() -> list[str]:
    """A real trace: what the toy target and its drafter answer to a hostile prompt."""
    question = ["--model", "toy", "--prompt", HOSTILE, "--max-new-tokens", 24]
    answer = command(*question, "--trace", "--json")
    assert answer.status == 0
    return answer.out.split("\n")[:-1]


def test_the_page_holds_the_trace_and_a_hostile_prompt_stays_text(trace_lines):
    text = page.make_page(page.read_trace(trace_lines, "here"))
    parsed = Scripts(text)
    data, program = parsed.scripts
    shown = json.loads(data)
    records = [json.loads(line) for line in trace_lines]
    assert shown["prompt"] == SHOWN
    assert shown["prompt_tokens"] == len(records[0]["tokens"])
    assert shown["cycles"] == records[1:-1]
    assert "b" not in parsed.tags  # the prompt's <b> has not become a tag
    assert "innerHTML =" not in program and "document.write" not in program


def test_the_page_fetches_nothing_and_is_small(trace_lines):
    text = page.make_page(page.read_trace(trace_lines, "here"))
    outside = re.findall(r"""(?:https?:)?//[a-z]|\bsrc=|<link|@import|url\(|\bfetch\(""", text)
    assert outside == []
    assert len(text.encode()) < 300_000


def texts_of(picture: str) -> dict[str, list[str]]:
    """The texts in a picture, by their classes."""
    texts = {"own": [], "draft": [], "unverified": [], "quiet": []}
    for element in xml.etree.ElementTree.fromstring(picture).iter(SVG + "text"):
        texts[element.get("class")].append(element.text)
    return texts


SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_shows_the_whole_answer_with_the_drafted_tokens_marked(trace_lines):
    trace = page.read_trace(trace_lines, "here")
    texts = texts_of(page.make_picture(trace))
    assert texts["quiet"][0] == SHOWN
    for kind in ("own", "draft"):
        expected = "".join(text for text, one in page.answer_pieces(trace) if one == kind)
        assert "".join("".join(texts[kind]).split()) == "".join(expected.split())
    assert texts["draft"] and not texts["unverified"]


def test_a_picture_holds_long_words_and_prompts_and_control_characters_and_marks_an_outage():
    cycle = {"drafts": [], "tokens": [1], "root": "", "offline": False}
    words = {**cycle, "text": "x" * 200 + " 😀" * 60 + "\x00\t\n"}
    alone = {**cycle, "text": "written alone", "tokens": [1, 2, 3], "offline": True}
    totals = {"tokens": [1, 1, 2, 3], "new_tokens": 4, "target_calls": 0, "acceptance_length": 0.0,
              "tokens_per_second": 1.0, "unverified_tokens": 3, "stopped": "stop token"}
    records = [{"prompt": "p" * 300, "tokens": [1]}, words, alone, totals]
    trace = page.read_trace([json.dumps(record) for record in records], "here")
    assert "3 tokens are the drafter's own" in trace["summary"]
    picture = page.make_picture(trace)
    texts = texts_of(picture)
    assert "".join(texts["own"]).replace(" ", "") == "x" * 200 + "😀" * 60 + "\\x00"
    assert texts["unverified"] == ["written alone"]
    assert "".join(texts["quiet"]).startswith("p" * 300 + "1 tokens in 1 passes of the target")
    right = float(re.search(r'viewBox="0 0 (\d+)', picture)[1]) - 24
    for element in xml.etree.ElementTree.fromstring(picture).iter(SVG + "text"):
        assert float(element.get("x")) + float(element.get("textLength")) <= right + 1


def test_the_command_answers_a_prompt_and_writes_one_file(tmp_path, checkpoint):
    out = tmp_path / "page.html"
    program = [sys.executable, "-m", "experiments.page", "--out", str(out), "--prompt", "Why?"]
    flags = [*checkpoint, "--max-new-tokens", "8"]
    done = subprocess.run([*program, *flags], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "page.html is written" in done.stderr
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("out", ["folder.html", "file/page.html"])
def test_an_out_that_cannot_be_written_is_refused_before_anything_is_answered(tmp_path, out):
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "file").touch()
    flags = ["--prompt", "Why?", "--no-such-flag"]  # speculate.py would refuse it
    assert_refused(run_here(page, "--out", tmp_path / out, *flags), "cannot be written")


@pytest.mark.parametrize("lines", [[], ['{"text": "hello"}'], ["no JSON"], ["1", "2"]])
def test_what_is_no_trace_is_refused(lines):
    with pytest.raises(InputError, match="a file: expected the output of speculate.py"):
        page.read_trace(lines, "a file")
