"""Imported first, before PyTorch, which takes seconds: what goes wrong until then ends in one line.

A script's own `run_command` only begins once everything is imported. Until then Ctrl-C, or a
package that is not installed, would print a traceback.
"""
import sys

REQUIREMENTS = ("torch", "numpy", "tokenizers", "safetensors", "tqdm")


def print_exception(kind, error, traceback) -> None:
    """Print an exception that nothing caught, as `sys.excepthook` does."""
    if kind is KeyboardInterrupt:
        return
    if kind is ModuleNotFoundError and error.name in REQUIREMENTS:
        print(f"error: {error}: run `pip install -r requirements.txt`", file=sys.stderr)
        sys.exit(2)
    sys.__excepthook__(kind, error, traceback)


sys.excepthook = print_exception
