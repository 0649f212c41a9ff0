"""Claims about files of prompts."""
import json

import pytest
from tiny_target import CHAT, write

from experiments.prompts import Prompt, read_first_questions, read_prompt_file
from plumbing.errors import InputError


def test_prompts_are_read_in_every_form(tmp_path):
    records = [
        {"prompt": "Hi"},
        {"category": "writing", "turns": ["Write.", "Again."]},
        {"messages": CHAT},
        {"data": ["Hi", "Hello!"]},
    ]
    path = write(tmp_path / "prompts", *records)
    (tmp_path / "array.json").write_text("\ufeff" + json.dumps(records), encoding="utf-8")
    prompts = [
        Prompt("other", ["Hi"]),
        Prompt("writing", ["Write.", "Again."]),
        Prompt("other", ["What is 2 + 2?", "Döner?"]),
        Prompt("other", ["Hi"]),
    ]
    questions = ["Hi", "Write.", "What is 2 + 2?", "Hi"]
    for file in (path, tmp_path / "array.json"):
        assert read_prompt_file(file) == prompts
        assert list(read_first_questions(file)) == questions


@pytest.mark.parametrize("line", [
    "Write a haiku.", "[1]", "3", '{"turns": []}', '{"prompt": 3}', '{"prompt": " \\n"}',
    '{"turns": ["a", ""]}', '{"prompt": "\\ud800"}', '{"prompt": "a", "category": "overall"}',
    '{"messages": [{"role": "assistant", "content": "a"}]}',
    '{"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}',
])
def test_a_malformed_or_empty_prompt_is_an_error_that_names_its_line_and_shows_a_right_one(
    tmp_path, line
):
    path = write(tmp_path / "prompts", {"prompt": "a"}, line)
    with pytest.raises(InputError, match=r'prompts, line 2: .*\{"prompt": '):
        read_prompt_file(path)


def test_a_file_without_prompts_is_an_error(tmp_path):
    with pytest.raises(InputError, match="no prompts"):
        read_prompt_file(write(tmp_path / "empty", ""))
