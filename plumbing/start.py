"""Importing this module loads the slow packages.

Scripts import it before everything else, only for this effect.

PyTorch takes seconds to load, and a script's `run_command`, which handles errors, runs only after
PyTorch has loaded. This module handles what may happen before. If the user presses Ctrl-C while the
packages load, the script ends silently with exit status 130. If a package is missing, the script
ends with one line and exit status 2. A program that imports a script as a library gets the
exception instead.
"""
import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def runs_our_script() -> bool:
    """Return whether Python was started to run a script of this repository, and not a program that
    imports one."""
    file = getattr(sys.modules["__main__"], "__file__", None)  # None: an interactive session
    return file is not None and Path(file).resolve().parent in (ROOT, ROOT / "experiments")


try:
    for package in ("numpy", "safetensors", "tokenizers", "torch", "tqdm"):
        importlib.import_module(package)
except (KeyboardInterrupt, ModuleNotFoundError) as error:
    if not runs_our_script():
        raise
    if isinstance(error, KeyboardInterrupt):
        sys.exit(130)
    print(f"error: {error}: run `pip install -r requirements.txt`", file=sys.stderr)
    sys.exit(2)
