"""Claims about `python -m experiments.curves`: what the logs of runs say is what is drawn."""
import json
import os
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

from experiments import curves
from plumbing.errors import run_command

SPACE = {"svg": "http://www.w3.org/2000/svg"}
LOSSES = [4.0, 3.0, 2.5, 2.25, 2.125, 2.0, 1.9, 1.8]


def write_run(folder: Path, losses: list[float], accuracies: list[float]) -> None:
    """A log with a line for each update, and one evaluation at its end."""
    folder.mkdir()
    records = [{"update": update, "loss": loss} for update, loss in enumerate(losses, 1)]
    scores = {"held_out_kl": 1.5, "implied_acceptance_length": 2.5, "depth_accuracy": accuracies}
    records.append({"update": len(losses), **scores})
    lines = [json.dumps(record) + "\n" for record in records]
    (folder / "log.jsonl").write_text("".join(lines))


def draw(monkeypatch, *folders: str | Path) -> xml.etree.ElementTree.Element:
    monkeypatch.setattr(sys, "argv", ["curves", *map(str, folders)])
    run_command(curves.main)
    return xml.etree.ElementTree.parse("curves.svg").getroot()


def legend_of(svg: xml.etree.ElementTree.Element) -> list[str]:
    return [text.text for text in svg.findall("svg:text", SPACE)]


def test_every_run_is_in_every_panel_and_in_the_legend(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "long", LOSSES, [0.9, 0.8, 0.7])
    write_run(tmp_path / "<short>", LOSSES[:3], [0.6])
    svg = draw(monkeypatch, "long", "<short>")
    assert legend_of(svg) == ["long", "<short>"]
    titles = []
    points = []
    for panel in svg.findall("svg:g", SPACE):
        titles.append(panel.find("svg:text", SPACE).text)
        lines = panel.findall("svg:polyline", SPACE)
        points.append([len(line.get("points").split()) for line in lines])
    assert titles == [
        "training loss", "held-out KL", "implied acceptance length", "accuracy, last evaluation"
    ]
    # (The first point is there twice.)
    assert points == [[1 + 8, 1 + 3], [1 + 1, 1 + 1], [1 + 1, 1 + 1], [1 + 3, 1 + 1]]


def test_each_point_is_drawn_where_its_value_is_on_the_axes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", LOSSES, [0.9])
    panel = draw(monkeypatch, "run").find("svg:g", SPACE)
    labels = [text.text for text in panel.findall("svg:text", SPACE)]
    assert labels[2:7] == ["0", "2", "4", "6", "8"]
    top = float(labels[-1])
    drawn = panel.find("svg:polyline", SPACE).get("points").split()[1:]
    for update, (point, loss) in enumerate(zip(drawn, LOSSES, strict=True), 1):
        x, y = map(float, point.split(","))
        assert x == pytest.approx(300 * update / 8, abs=0.1)
        assert y == pytest.approx(200 - 200 * loss / top, abs=0.2)


@pytest.mark.parametrize("lowest, highest, ticks", [
    (0, 0.218, [0, 0.05, 0.1, 0.15, 0.2, 0.25]),
    (0, 8, [0, 2, 4, 6, 8]),
    (0, 186_000, [0, 50_000, 100_000, 150_000, 200_000]),
    (0.6, 0.97, [0.6, 0.7, 0.8, 0.9, 1.0]),
    (0, 0, [0, 0.2, 0.4, 0.6, 0.8, 1]),
])
def test_an_axis_has_round_numbers_up_to_its_highest_value(lowest, highest, ticks):
    assert curves.axis_ticks(lowest, highest) == pytest.approx(ticks)


def test_a_long_curve_is_averaged():
    log = [{"update": i, "loss": float(i % 2)} for i in range(10_000)]
    points = curves.update_curve(log, "loss")
    assert len(points) <= curves.MAX_POINTS
    assert all(value == pytest.approx(0.5, abs=0.02) for _, value in points)


def test_a_folder_without_a_run_is_one_line_and_draws_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        draw(monkeypatch, "nowhere")
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "nowhere: no run with a log" in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["größe".encode(), "größe".encode("latin-1")])
def test_a_folder_may_have_any_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    folder = os.fsdecode(name)
    write_run(Path(folder), LOSSES, [0.9])
    (drawn,) = legend_of(draw(monkeypatch, folder))
    assert drawn.startswith("gr") and drawn.endswith("e")
