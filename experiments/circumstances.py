"""Where, when and with which code something was measured: noted beside the figures."""
import os
import platform
import re
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

import torch


def circumstances(device: torch.device) -> dict[str, str]:
    """Return the command line, the machine, today's date and the commit."""
    program = f"experiments.{Path(sys.argv[0]).stem}"
    return {
        "command": " ".join(["python -m", program, *sys.argv[1:]]),
        "machine": machine(device),
        "date": date.today().isoformat(),
        "commit": commit(),
    }


def machine(device: torch.device) -> str:
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():  # Linux: it knows the model
        models = re.findall("model name.*: (.*)", Path("/proc/cpuinfo").read_text())
        processor = models[0] if models else processor
    if device.type == "cuda":
        processor = torch.cuda.get_device_name(device)
    return (
        f"{processor}, {os.cpu_count()} CPU cores, {platform.system()}; "
        f"CPython {platform.python_version()}, torch {torch.__version__}"
    )


def commit() -> str:
    """Return the commit of the code, with "-dirty" if a script was changed since. Empty outside a
    clone, or without git."""
    if shutil.which("git") is None:
        return ""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py")
    return git("describe", "--always") + ("-dirty" if changed else "")
