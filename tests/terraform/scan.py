"""Scan the modules for what is unsafe: ``make terraform``.

Runs in the scanner's own environment, so it imports nothing of this project.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

TERRAFORM_DIR = Path(__file__).parents[2] / "terraform"
_SCAN_S = 300.0


def problems_of(answer: dict[str, Any]) -> list[str]:
    """Return what the scanner has found. It ends well where it could not read a file, and where it found none."""
    failed = answer.get("results", {}).get("failed_checks", [])
    summary = answer.get("summary", answer)  # without a single resource, there is no more than the summary
    found = [
        f"{check['check_id']} {check['check_name']}: {check['resource']} ({check['file_path']})" for check in failed
    ]
    if num_unread := summary["parsing_errors"]:
        found.append(f"{num_unread} files could not be parsed")
    if not summary["passed"]:
        found.append("nothing was checked")
    return found


def scan(directory: Path) -> tuple[dict[str, Any], list[str]]:
    """The scanner's answer, and its problems. It asks nobody: what it goes by was installed with it."""
    scanner = Path(sys.executable).with_name("checkov")
    configuration = str(TERRAFORM_DIR / ".checkov.yaml")
    done = subprocess.run(
        [scanner, "-d", str(directory), "--config-file", configuration, "--output", "json", "--soft-fail"],
        capture_output=True,
        text=True,
        timeout=_SCAN_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{scanner} ended with {done.returncode}:\n{done.stderr}")
    answer = json.loads(done.stdout)
    return answer, problems_of(answer)


def main(arguments: list[str]) -> int:
    """1 where anything is wrong."""
    directory = Path(arguments[0]) if arguments else TERRAFORM_DIR
    answer, problems = scan(directory)
    summary = answer.get("summary", answer)
    print(f"checkov {summary['checkov_version']}: {summary['passed']} checks of {summary['resource_count']} resources")
    print("NOT RUN: `terraform validate` and `plan`, which need the providers' plugins.")
    for problem in problems:
        print(f"FAILED: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
