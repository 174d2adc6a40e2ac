"""The modules as Terraform itself evaluates them, without a provider: of each, the files that have nothing of one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TERRAFORM_DIR = Path(__file__).parents[2] / "terraform"
MODULES_DIR = TERRAFORM_DIR / "modules"
TERRAFORM = shutil.which("terraform") or shutil.which("tofu")
_TIMEOUT_S = 120.0


def run(directory: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Terraform, with nobody's configuration and no network."""
    assert TERRAFORM is not None
    configuration = directory / "no-configuration"
    configuration.touch()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TF_")},
        "TF_CLI_CONFIG_FILE": str(configuration),
        "CHECKPOINT_DISABLE": "1",
        "TF_IN_AUTOMATION": "1",
    }
    return subprocess.run(
        [TERRAFORM, *arguments],
        cwd=directory,
        input=stdin,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )


def without_provider(module: str, directory: Path) -> Path:
    """A copy of the module's variables and of what it computes from them alone."""
    copied = directory / module
    copied.mkdir(parents=True)
    for path in (MODULES_DIR / module).glob("*.tf*"):
        if path.name not in ("main.tf", "outputs.tf", "versions.tf"):
            shutil.copy(path, copied)
    return copied


def evaluate(module: str, expression: str, variables: Mapping[str, Any], directory: Path) -> Any:
    """Return what Terraform makes of `expression` in the module."""
    copied = without_provider(module, directory)
    (copied / "given.tfvars.json").write_text(json.dumps(variables))
    done = run(copied, "console", "-var-file=given.tfvars.json", stdin=f"jsonencode({expression})\n")
    assert done.returncode == 0, done.stderr
    return json.loads(json.loads(done.stdout))


GIVEN: Mapping[str, Mapping[str, Any]] = {
    "s3-trainer": {"bucket_arn": "arn:aws:s3:::checkpoints", "prefix": "run"},
    "s3-trainer-resuming": {"bucket_arn": "arn:aws:s3:::checkpoints", "prefix": "run", "trainer_may_resume": True},
    "s3-trainer-without-delete": {
        "bucket_arn": "arn:aws:s3:::checkpoints",
        "prefix": "run",
        "trainer_may_delete": False,
    },
    "s3-reader": {"bucket_arn": "arn:aws:s3:::checkpoints", "prefix": "run"},
    "s3-janitor": {"bucket_arn": "arn:aws:s3:::checkpoints", "prefix": "run"},
}
"""The variables with which each policy in `POLICIES_DIR` was made."""
POLICIES_DIR = Path(__file__).parent / "policies"


def rendered(names: Sequence[str], directory: Path) -> dict[str, Any]:
    """The policies of these names, as the module makes them."""
    found = {}
    for name in names:
        role = name.split("-")[1]
        policies = evaluate("s3-roles", "local.policies", GIVEN[name], directory / name)
        found[name] = json.loads(policies[role])
    return found


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        for name, policy in rendered(list(GIVEN), Path(made)).items():
            POLICIES_DIR.mkdir(exist_ok=True)
            (POLICIES_DIR / f"{name}.json").write_text(json.dumps(policy, indent=2) + "\n")
