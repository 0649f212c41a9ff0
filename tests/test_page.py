"""The page and the picture of an answer: they show the trace, all of it and nothing else."""
import json
import re
import subprocess
import sys
import xml.etree.ElementTree
from html.parser import HTMLParser

import pytest
from conftest import ROOT

from experiments import page
from plumbing.errors import InputError

HOSTILE = '</script><b>"&\u2028'


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
    command = [
        sys.executable, "speculate.py", "--model", "toy", "--device", "cpu", "--prompt", HOSTILE,
        "--max-new-tokens", "24", "--trace", "--json",
    ]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return answer.stdout.decode().split("\n")[:-1]


def test_the_page_holds_the_trace_and_a_hostile_prompt_stays_text(trace_lines):
    text = page.make_page(page.read_trace(trace_lines, "here"))
    parsed = Scripts(text)
    data, program = parsed.scripts
    shown = json.loads(data)
    records = [json.loads(line) for line in trace_lines]
    assert shown["prompt"] == HOSTILE
    assert shown["prompt_tokens"] == len(records[0]["tokens"])
    assert shown["cycles"] == records[1:-1]
    assert "b" not in parsed.tags  # the prompt's <b> has not become a tag
    assert "innerHTML =" not in program and "document.write" not in program


def test_the_page_fetches_nothing_and_is_small(trace_lines):
    text = page.make_page(page.read_trace(trace_lines, "here"))
    outside = re.findall(r"""(?:https?:)?//[a-z]|\bsrc=|<link|@import|url\(|\bfetch\(""", text)
    assert outside == []
    assert len(text.encode()) < 300_000


def test_the_picture_shows_the_whole_answer_with_the_drafted_tokens_marked(trace_lines):
    trace = page.read_trace(trace_lines, "here")
    picture = xml.etree.ElementTree.fromstring(page.make_picture(trace))
    texts = {"own": "", "draft": "", "quiet": ""}
    for element in picture.iter("{http://www.w3.org/2000/svg}text"):
        texts[element.get("class")] += element.text
    assert texts["quiet"].startswith(HOSTILE)
    for kind in ("own", "draft"):
        expected = "".join(text for text, one in page.answer_pieces(trace) if one == kind)
        assert "".join(texts[kind].split()) == "".join(expected.split())
    assert texts["draft"]


def test_the_command_answers_a_prompt_and_writes_one_file(tmp_path):
    flags = ["--model", "toy", "--device", "cpu", "--max-new-tokens", "8"]
    out = tmp_path / "page.html"
    command = [sys.executable, "-m", "experiments.page", "--prompt", "def close(self):"]
    subprocess.run([*command, "--out", str(out), *flags], cwd=ROOT, check=True)
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("lines", [[], ['{"text": "hello"}'], ["no JSON"], ["1", "2"]])
def test_what_is_no_trace_is_refused(lines):
    with pytest.raises(InputError, match="a file: expected the output of speculate.py"):
        page.read_trace(lines, "a file")
