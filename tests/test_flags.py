"""Claims about command lines: values, and what is refused."""
import argparse
from pathlib import Path

import pytest

from plumbing import flags
from plumbing.flags import Parser, bandwidth, duration, loss_rate


@pytest.mark.parametrize("quantity, text, value", [
    (duration, "21ms", 0.021),
    (duration, "0.5s", 0.5),
    (duration, "0ms", 0.0),
    (duration, ".5s", 0.5),
    (bandwidth, "20Mbit", 2e7),
    (bandwidth, "300kbit", 3e5),
    (bandwidth, "1.5Gbit", 1.5e9),
    (loss_rate, "0.1%", 0.001),
])
def test_quantities_are_read_with_their_units(quantity, text, value):
    assert quantity(text) == pytest.approx(value)


INVALID = {
    duration: ["", "21", "ms", "-1ms", "nanms", "infs", "inf", "1e3s", "1 s", "1m", "2h", "1..2s",
               "١s", "1s\n", "9" * 400 + "s"],
    bandwidth: ["", "0Mbit", "-3Mbit", "Mbit", "20MB", "1s"],
    loss_rate: ["", "-1%", "100%", "1"],
}


@pytest.mark.parametrize("quantity", INVALID, ids=["duration", "bandwidth", "loss_rate"])
def test_an_invalid_quantity_is_one_line_that_says_how_to_write_one(quantity):
    for text in INVALID[quantity]:
        with pytest.raises(argparse.ArgumentTypeError, match="like") as error:
            quantity(text)
        assert "\n" not in str(error.value)


def test_an_address_is_a_host_and_a_port_and_this_machine_where_there_is_no_host():
    assert flags.address("server.example:7000") == ("server.example", 7000)
    assert flags.address("10.0.0.1:0") == ("10.0.0.1", 0)
    assert flags.address("[::1]:7000") == ("::1", 7000)
    assert flags.address("7000") == ("localhost", 7000)
    for text in (
        "", ":", ":7000", "host", "host:", "host:x", "host:-1", "host:70000", "host:²", "host:١",
        "http://host:80", "host/path:80", "::1:7000", "[::1:7000", "[]:7",
    ):
        with pytest.raises(argparse.ArgumentTypeError, match="expected PORT or HOST:PORT"):
            flags.address(text)


def test_a_tilde_is_the_home_folder_in_every_path_even_after_an_equals_sign(monkeypatch):
    monkeypatch.setenv("HOME", "/home/of/mine")
    parser = flags.Parser()
    parser.add_argument("--out", type=flags.path)
    flags.add_model_arguments(parser)
    args = parser.parse_args(["--out=~/runs/x", "--model=~/m"])
    assert args.out == Path("/home/of/mine/runs/x")
    assert args.model == "/home/of/mine/m"


def test_help_has_groups_and_ends_with_the_examples_as_they_are_written(capsys):
    parser = flags.Parser(prog="llama.py", examples="  a --b   c\n  d")
    flags.add_model_arguments(parser.add_argument_group("model"))
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    text = capsys.readouterr().out
    assert "\nmodel:\n  --model" in text
    assert text.endswith("\n\nexamples:\n  a --b   c\n  d\n")


def test_a_flag_is_not_abbreviated(capsys):
    parser = Parser()
    parser.add_argument("--updates", type=int)
    with pytest.raises(SystemExit):
        parser.parse_args(["--update", "5"])
