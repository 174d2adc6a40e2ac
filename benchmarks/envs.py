"""Interpreters for rivals whose dependencies do not get on with ours: s3fs pins a botocore of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RivalEnvironment:
    """Packages of one rival, and the place of its interpreter."""

    system: str
    requirements: tuple[str, ...]

    def directory(self, root: Path) -> Path:
        return root / f".benchenv-{self.system}"

    def python(self, root: Path) -> Path:
        return self.directory(root) / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


ENVIRONMENTS: Mapping[str, RivalEnvironment] = {
    environment.system: environment
    for environment in (
        # Without boto3, for which pip would search minutes for a version that takes aiobotocore's botocore.
        RivalEnvironment(system="s3fs", requirements=("s3fs>=2026.1",)),
        RivalEnvironment(system="s3torchconnector", requirements=("s3torchconnector[dcp]>=1.5",)),
    )
}

_OF_ANOTHER = {"s3fs-tuned": "s3fs", "s3torchconnector-kept": "s3torchconnector"}


def environment_of(system: str) -> RivalEnvironment | None:
    """The environment that a rival runs in; None for the other systems."""
    return ENVIRONMENTS.get(_OF_ANOTHER.get(system, system))


def is_installed_here(environment: RivalEnvironment) -> bool:
    """True if the running interpreter can import the rival."""
    return importlib.util.find_spec(environment.system) is not None


def set_up(environment: RivalEnvironment, root: Path) -> Path:
    """Make the environment unless it is there, and return its interpreter.

    It sees this environment's torch, which is large, through a path file; its own packages come first.
    """
    python = environment.python(root)
    directory = environment.directory(root)
    if is_set_up(environment, root):
        return python
    venv.create(directory, with_pip=True, clear=True)
    _purelib(python).joinpath("main-environment.pth").write_text(f"{_torch_parent()}\n")
    quietly = ("--quiet", "--disable-pip-version-check", "--no-warn-conflicts")  # with packages that its own hide
    subprocess.run([python, "-m", "pip", "install", *quietly, *environment.requirements], check=True)
    _ready(environment, root).write_text("\n".join(environment.requirements))
    return python


def is_set_up(environment: RivalEnvironment, root: Path) -> bool:
    """True if `set_up` would do nothing."""
    ready = _ready(environment, root)
    return ready.is_file() and ready.read_text() == "\n".join(environment.requirements)


def _ready(environment: RivalEnvironment, root: Path) -> Path:
    """A file that holds the requirements, written last."""
    return environment.directory(root) / "ready"


def _torch_parent() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("torch is not installed in the environment that runs the benchmark")
    return Path(spec.origin).parent.parent


def _purelib(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    answer = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return Path(answer.stdout.strip())
