"""Find the servers' programs, or name the package to install."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]


def from_debian(program: str, package: str) -> str:
    """The path of `program`, which Debian's `package` brings."""
    # Some of them lie where only root looks.
    found = shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if found is None:
        raise FileNotFoundError(
            f"{program} is not installed: 'make integration' installs it on Debian and Ubuntu when run by root; "
            f"elsewhere: apt-get install --no-install-recommends {package}"
        )
    return found


def from_servers_environment(program: str, *, folder: str = "bin") -> Path:
    """The path of `program` in the environment that the servers from PyPI and npm have to themselves."""
    environment = Path(os.environ.get("CLOUDCKPT_SERVERS_VENV", REPOSITORY / ".venv-servers")).absolute()
    path = environment / folder / program
    if not os.access(path, os.X_OK):
        raise FileNotFoundError(
            f"there is no {path}: run 'make integration', which makes that environment, or let CLOUDCKPT_SERVERS_VENV "
            f"say where it is"
        )
    return path
