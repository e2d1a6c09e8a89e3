"""speculators, the trainer this one is compared with: which version, and whether it is there."""

from __future__ import annotations

import os
import shutil
import subprocess

THEIR_VERSION = "0.9.0"
HOW_TO_INSTALL = f"make an environment of its own: pip install speculators=={THEIR_VERSION}"


def installed_version(python: str) -> str:
    """Of speculators in the environment of this interpreter; empty where either is not there."""
    found = shutil.which(python)
    if not found:
        return ""
    code = "from importlib.metadata import version; print(version('speculators'))"
    ended = subprocess.run(
        [found, "-c", code],
        env=their_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.stdout.strip()


def their_environment() -> dict[str, str]:
    """Of this process, without the folders that its own interpreter looks into."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
