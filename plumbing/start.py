"""Loads the packages that scripts need. Scripts import it before everything else.

PyTorch takes seconds to load, and a script's own `run_command` begins after that. If Ctrl-C comes
meanwhile, the script ends in silence. If a package is missing, it ends in one line and exit status
2. Whoever imports a script as a library gets the exception.
"""
import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def is_script() -> bool:
    """Tell whether the program that runs is one of this repository's scripts."""
    file = getattr(sys.modules["__main__"], "__file__", None)  # None: an interactive session
    return file is not None and Path(file).resolve().parent in (ROOT, ROOT / "experiments")


try:
    for package in ("numpy", "safetensors", "tokenizers", "torch", "tqdm"):
        importlib.import_module(package)
except (KeyboardInterrupt, ModuleNotFoundError) as error:
    if not is_script():
        raise
    if isinstance(error, KeyboardInterrupt):
        sys.exit(130)
    print(f"error: {error}: run `pip install -r requirements.txt`", file=sys.stderr)
    sys.exit(2)
