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
import itertools
import json
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

from tqdm import tqdm

from plumbing.errors import InputError, input_errors, run_command
from plumbing.files import atomic_write
from plumbing.flags import Parser, path

TEMPLATE = Path(__file__).with_name("page.html")
SPECULATE = Path(__file__).parent.parent / "speculate.py"
COLUMNS = 52  # characters in a line of the picture: few enough to be read on a phone
CHARACTER = 9.05  # width of one, in the units of the picture: the browser is told to keep to it
SMALL_CHARACTER = 7.85  # of the prompt and the caption
LINE = 24  # height of a line
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and line break


def check_writable(out: Path) -> None:
    """Raise InputError if a file cannot be written there. Whatever is there stays as it is."""
    with input_errors(f"{out} cannot be written", OSError):
        if out.is_dir():
            raise IsADirectoryError("it is a folder")
        out.parent.mkdir(parents=True, exist_ok=True)
        probe = Path(f"{out}.part")
        probe.touch()
        probe.unlink()


def run_speculate(prompt: str, flags: list[str]) -> list[str]:
    """Answer a prompt. Returns the lines of --trace --json. Raises InputError."""
    command = [sys.executable, str(SPECULATE), "--prompt", prompt, "--trace", "--json", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as process:
        lines = list(tqdm(process.stdout, "answering", unit=" cycles", leave=False))
    if process.returncode != 0:
        raise InputError("speculate.py failed: see above")
    return lines


def read_trace(lines: list[str], source: str) -> dict:
    """Read what --trace --json prints: the prompt, a line for each cycle, and the totals.

    Returns what page.html expects. Control characters are replaced by their names: a browser shows
    nothing for them, and an SVG file must not hold them. Raises InputError.
    """
    expected = f"{source}: expected the output of speculate.py --trace --json"
    with input_errors(expected, ValueError, LookupError, TypeError):
        first, *cycles, totals = [json.loads(line) for line in lines if line.strip()]
        for cycle in cycles:
            for record in (cycle, *cycle["drafts"]):
                record["text"] = escape_controls(record["text"])
            cycle["root"] = escape_controls(cycle["root"])
        summary = (
            f"{totals['new_tokens']} new tokens, {totals['tokens_per_second']:.1f} per second. "
            f"After the pass over the prompt, the target made {totals['target_calls']} passes. "
            f"The acceptance length, {totals['acceptance_length']:.2f}, is the number of new "
            "tokens in each of these."
        )
        if totals.get("unverified_tokens"):
            summary += f" {totals['unverified_tokens']} tokens are the drafter's own, unverified."
        return {
            "prompt": escape_controls(first["prompt"]),
            "prompt_tokens": len(first["tokens"]),
            "cycles": [cycle for cycle in cycles if cycle["tokens"]],
            "summary": summary,
            "stopped": totals["stopped"],
            "stop": totals["tokens"][-1] if totals["stopped"] == "stop token" else None,
        }


def escape_controls(text: str) -> str:
    r"""Return text with \x1b, say, in place of a control character."""
    return CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def make_page(trace: dict) -> str:
    """Put a trace into the page."""
    # A "<" of the text, as in "</script>", must not be read as HTML. JSON can spell it otherwise.
    data = json.dumps(trace, ensure_ascii=False).replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace("TRACE", data, 1)


# --- The picture ---

PICTURE = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"
  role="img"
  font-family="ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace" font-size="15">
<title>{title}</title>
<style>
  .card {{ fill: #ffffff; stroke: #d5d9e0 }} .ground {{ fill: #d9f2e0 }}
  .own {{ fill: #1c2128 }} .draft {{ fill: #11692f; font-weight: 600 }}
  .unverified {{ fill: #7a5200 }} .doubt {{ fill: #fdf0cf }}
  .quiet {{ fill: #5a6472; font-size: 13px }}
  @media (prefers-color-scheme: dark) {{
    .card {{ fill: #12151a; stroke: #363e4a }} .ground {{ fill: #153d22 }}
    .own {{ fill: #e6e9ee }} .draft {{ fill: #7ee29a }} .quiet {{ fill: #a2acba }}
    .unverified {{ fill: #f4cf7a }} .doubt {{ fill: #443411 }}
  }}
</style>
<rect class="card" x="1" y="1" width="{right:.0f}" height="{bottom:.0f}" rx="12"/>
{body}
</svg>
"""
GROUNDS = {"draft": "ground", "unverified": "doubt"}  # the class of what lies behind a text


def answer_pieces(trace: dict) -> list[tuple[str, str]]:
    """Return the answer in pieces, each with its class in the picture: "draft" for what was drafted
    and accepted, "own" for the target's, "unverified" for what the drafter wrote alone. An answer
    that was cut ends in an ellipsis."""
    pieces = []
    for cycle in trace["cycles"]:
        if cycle["offline"]:
            pieces.append((cycle["text"], "unverified"))
            continue
        accepted = [node for node in cycle["drafts"] if node["accepted"]]
        for node in accepted:
            pieces.append((node["text"], "draft"))
        if len(cycle["tokens"]) > len(accepted):
            pieces.append((cycle["text"], "own"))
    if trace["stopped"] != "stop token":
        pieces.append((" …", "own"))
    return pieces


def wrap(pieces: list[tuple[str, str]], columns: int) -> list[list[tuple[str, str]]]:
    """Break pieces into lines, between words where there are any. Returns the pieces of each."""
    lines = [[]]  # of characters, each with its class
    for text, kind in pieces:
        for character in text.expandtabs(4):
            if character == "\n":
                lines.append([])
                continue
            line = lines[-1]
            line.append((character, kind))
            if sum(cells(one) for one, _ in line) > columns:
                spaces = [i for i, (one, _) in enumerate(line) if one == " "]
                end = spaces[-1] if spaces else len(line) - 1
                rest = line[end + 1:] if spaces else line[end:]
                lines[-1:] = [line[:end], rest]
    return [join_equal(line) for line in lines]


def cells(text: str) -> int:
    """Return how many columns a text takes up in a font of equal widths: an emoji takes two."""
    width = 0
    for character in text:
        if not unicodedata.combining(character):
            width += 2 if unicodedata.east_asian_width(character) in "WF" else 1
    return width


def join_equal(line: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Join neighboring characters of the same class."""
    joined = []
    for kind, characters in itertools.groupby(line, key=lambda pair: pair[1]):
        joined.append(("".join(character for character, _ in characters), kind))
    return joined


def make_picture(trace: dict) -> str:
    """Draw the answer, with the drafted tokens in green."""
    body = []
    y = 12  # the baseline of the last line
    small_columns = int(COLUMNS * CHARACTER / SMALL_CHARACTER)

    def add_small(text: str) -> None:
        nonlocal y
        for line in wrap([(text, "quiet")], small_columns):
            y += 20
            for text, kind in line:
                body.append(text_line(text, 24, y, kind, cells(text) * SMALL_CHARACTER))

    add_small(trace["prompt"])
    y += 8
    for line in wrap(answer_pieces(trace), COLUMNS):
        y += LINE
        x = 24.0
        for text, kind in line:
            width = cells(text) * CHARACTER
            if kind in GROUNDS:
                body.append(
                    f'<rect class="{GROUNDS[kind]}" x="{x:.1f}" y="{y - 16}" '
                    f'width="{width:.1f}" height="21" rx="3"/>'
                )
            body.append(text_line(text, x, y, kind, width))
            x += width
    y += 14
    add_small(caption(trace))
    width = 48 + COLUMNS * CHARACTER
    return PICTURE.format(
        width=width, height=y + 22, right=width - 2, bottom=y + 20, body="\n".join(body),
        title="An answer. The tokens that the drafter proposed and the target accepted are green.",
    )


def caption(trace: dict) -> str:
    """Say how many tokens there are of each kind, and in how many passes of the target."""
    verified = [cycle for cycle in trace["cycles"] if not cycle["offline"]]
    tokens = sum(len(cycle["tokens"]) for cycle in verified)
    drafted = sum(kind == "draft" for _, kind in answer_pieces(trace))
    alone = sum(len(cycle["tokens"]) for cycle in trace["cycles"]) - tokens
    text = (
        f"{tokens} tokens in {len(verified)} passes of the target, "
        f"{tokens / len(verified):.1f} in each. Green: drafted and accepted, {drafted}."
    )
    if alone:
        text += f" Yellow: the drafter's own, while the server was out of reach, {alone}."
    return text


def text_line(text: str, x: float, y: float, kind: str, width: float) -> str:
    """Return an SVG text element, stretched to a width."""
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y}" xml:space="preserve" textLength="{width:.1f}" '
        f'lengthAdjust="spacingAndGlyphs">{html.escape(text)}</text>'
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
    check_writable(args.out)  # before the answer, which takes longer
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
    print(f"{args.out} is written: open it in a browser", file=sys.stderr)


if __name__ == "__main__":
    run_command(main)
