# SPDX-License-Identifier: Apache-2.0
"""The Python examples of the README run as they stand."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_readme(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "ci" / "run_example.py", ROOT / "README.md"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ran" in done.stdout
