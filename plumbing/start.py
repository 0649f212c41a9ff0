"""Imported first, before PyTorch, which takes seconds to load. Until then Ctrl-C ends a script in
silence, and a missing package ends it with one line and exit status 2 instead of a traceback.

(A script's own `run_command` only begins once everything is imported. Where these files are used as
a library, nothing is changed.)
"""
import sys
from pathlib import Path

REQUIREMENTS = ("torch", "numpy", "tokenizers", "safetensors", "tqdm")
ROOT = Path(__file__).resolve().parent.parent


def print_exception(kind, error, traceback) -> None:
    """Print an exception that nothing caught, as `sys.excepthook` does."""
    if kind is KeyboardInterrupt:
        return
    if kind is ModuleNotFoundError and error.name in REQUIREMENTS:
        print(f"error: {error}: run `pip install -r requirements.txt`", file=sys.stderr)
        sys.exit(2)
    sys.__excepthook__(kind, error, traceback)


script = getattr(sys.modules["__main__"], "__file__", None)  # None: an interactive session
if script and Path(script).resolve().is_relative_to(ROOT):
    sys.excepthook = print_exception
