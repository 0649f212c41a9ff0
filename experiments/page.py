"""A page to watch: one answer, cycle by cycle, as a single HTML file; or a picture of it, as SVG.

    python -m experiments.page --prompt "Why is the sky blue?" --out page.html
    python -m experiments.page --prompt "Why is the sky blue?" --out answer.svg     # only the text
    python speculate.py --prompt "..." --trace --json > trace.jsonl
    python -m experiments.page --trace trace.jsonl --out page.html

With --prompt it runs speculate.py, and hands on all flags that it does not know itself, such as
--model, --max-new-tokens or --remote. The page is experiments/page.html with the trace put in. It
loads nothing from elsewhere, so it can be mailed, or opened from a disk.
"""
from __future__ import annotations

import html
import json
import subprocess
import sys
from pathlib import Path

from plumbing.errors import InputError, input_errors, run_command
from plumbing.files import atomic_write
from plumbing.flags import Parser, path

TEMPLATE = Path(__file__).with_name("page.html")
SPECULATE = Path(__file__).parent.parent / "speculate.py"
COLUMNS = 76  # characters in a line of the picture
CHARACTER = 9.05  # width of one, in the units of the picture: the browser is told to keep to it
LINE = 24  # height of a line


def run_speculate(prompt: str, flags: list[str]) -> list[str]:
    """Answer a prompt. Returns the lines of --trace --json. Raises InputError."""
    command = [sys.executable, str(SPECULATE), "--prompt", prompt, "--trace", "--json", *flags]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    if answer.returncode != 0:
        raise InputError("speculate.py failed: see above")
    return answer.stdout.splitlines()


def read_trace(lines: list[str], source: str) -> dict:
    """Read what --trace --json prints: the prompt, a line for each cycle, and the totals.

    Returns what page.html expects. Raises InputError.
    """
    expected = f"{source}: expected the output of speculate.py --trace --json"
    with input_errors(expected, ValueError, LookupError, TypeError):
        first, *cycles, totals = [json.loads(line) for line in lines if line.strip()]
        summary = (
            f"{totals['new_tokens']} new tokens in {totals['target_calls']} passes of the target "
            f"after the one over the prompt: acceptance length {totals['acceptance_length']:.2f}, "
            f"{totals['tokens_per_second']:.1f} tokens per second."
        )
        return {
            "prompt": first["prompt"],
            "prompt_tokens": len(first["tokens"]),
            "cycles": [cycle for cycle in cycles if cycle["tokens"]],
            "summary": summary,
            "stopped": totals["stopped"],
        }


def make_page(trace: dict) -> str:
    """Put a trace into the page."""
    # A "<" of the text, as in "</script>", must not be read as HTML. JSON can spell it otherwise.
    data = json.dumps(trace, ensure_ascii=False).replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace("TRACE", data, 1)


# --- The picture ---

PICTURE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img"
  font-family="ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace" font-size="15">
<title>{title}</title>
<style>
  .card {{ fill: #ffffff; stroke: #d5d9e0 }} .ground {{ fill: #d9f2e0 }}
  .own {{ fill: #1c2128 }} .draft {{ fill: #11692f; font-weight: 600 }}
  .quiet {{ fill: #5a6472; font-size: 13px }}
  @media (prefers-color-scheme: dark) {{
    .card {{ fill: #12151a; stroke: #363e4a }} .ground {{ fill: #153d22 }}
    .own {{ fill: #e6e9ee }} .draft {{ fill: #7ee29a }} .quiet {{ fill: #a2acba }}
  }}
</style>
<rect class="card" x="1" y="1" width="{right:.0f}" height="{bottom:.0f}" rx="12"/>
{body}
</svg>
"""


def answer_pieces(trace: dict) -> list[tuple[str, str]]:
    """Return the answer in pieces, each with its class in the picture: "draft" for what was drafted
    and accepted, "own" for the target's. An answer that was cut ends in an ellipsis."""
    pieces = []
    for cycle in trace["cycles"]:
        accepted = [node for node in cycle["drafts"] if node["accepted"]]
        for node in accepted:
            pieces.append((node["text"], "draft"))
        if len(cycle["tokens"]) > len(accepted):
            pieces.append((cycle["text"], "own"))
    if trace["stopped"] != "stop token":
        pieces.append((" …", "own"))
    return pieces


def wrap(pieces: list[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Break pieces into lines of COLUMNS characters, between words."""
    characters = []
    for text, kind in pieces:
        for character in text:
            characters.append((character, kind))
    lines = [[]]
    word = []

    def end_word() -> None:
        if len(lines[-1]) + len(word) > COLUMNS and lines[-1]:
            if lines[-1][-1][0] == " ":
                lines[-1].pop()
            lines.append([])
        lines[-1].extend(word)
        word.clear()

    for character, kind in characters:
        if character == "\n":
            end_word()
            lines.append([])
        elif character == " ":
            end_word()
            if lines[-1] and len(lines[-1]) < COLUMNS:
                lines[-1].append((character, kind))
        else:
            word.append((character, kind))
    end_word()
    return lines


def make_picture(trace: dict) -> str:
    """Draw the answer, with the drafted tokens in green."""
    pieces = answer_pieces(trace)
    body = [text_line(trace["prompt"], x=24, y=36, kind="quiet")]
    y = 44
    for line in wrap(pieces):
        y += LINE
        x = 24.0
        for text, kind in join_equal(line):
            width = len(text) * CHARACTER
            if kind == "draft":
                body.append(
                    f'<rect class="ground" x="{x:.1f}" y="{y - 16}" width="{width:.1f}" '
                    f'height="21" rx="3"/>'
                )
            body.append(text_line(text, x, y, kind, width))
            x += width
    y += LINE + 10
    tokens = sum(len(cycle["tokens"]) for cycle in trace["cycles"])
    drafted = sum(kind == "draft" for _, kind in pieces)
    passes = len(trace["cycles"])
    caption = (
        f"{tokens} tokens in {passes} passes of the target, {tokens / passes:.1f} in each. "
        f"Green: drafted and accepted, {drafted}."
    )
    body.append(text_line(caption, 24, y, "quiet"))
    width = 48 + COLUMNS * CHARACTER
    return PICTURE.format(
        width=width, height=y + 22, right=width - 2, bottom=y + 20, body="\n".join(body),
        title="An answer. The tokens that the drafter proposed and the target accepted are green.",
    )


def join_equal(line: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Join neighbouring characters of the same class."""
    joined = []
    for character, kind in line:
        before, before_kind = joined[-1] if joined else ("", None)
        if before_kind == kind:
            joined[-1] = (before + character, kind)
        else:
            joined.append((character, kind))
    return joined


def text_line(text: str, x: float, y: float, kind: str, width: float | None = None) -> str:
    """Return an SVG text element, stretched to a width if one is given."""
    length = f' textLength="{width:.1f}" lengthAdjust="spacingAndGlyphs"' if width else ""
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y}" xml:space="preserve"{length}>'
        f"{html.escape(text)}</text>"
    )


def main() -> None:
    parser = Parser(description="Write a page, or a picture, of one answer with drafts.")
    source = parser.add_mutually_exclusive_group(required=True).add_argument
    source("--prompt", help="answer this; other flags are speculate.py's")
    source("--trace", type=path, metavar="FILE", help="what speculate.py --trace --json printed")
    parser.add_argument("--out", type=path, required=True, metavar="FILE", help=".html or .svg")
    args, flags = parser.parse_known_args()
    makers = {".html": make_page, ".svg": make_picture}
    if args.out.suffix not in makers:
        parser.error(f"--out {args.out}: the name must end in .html or .svg")
    if args.trace:
        if flags:
            parser.error(f"unrecognized arguments: {' '.join(flags)}")
        with input_errors(f"{args.trace} cannot be read", OSError, UnicodeError):
            lines = args.trace.read_text(encoding="utf-8").splitlines()
    else:
        lines = run_speculate(args.prompt, flags)
    trace = read_trace(lines, str(args.trace or "speculate.py"))
    with atomic_write(args.out) as part:
        part.write_text(makers[args.out.suffix](trace), encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
