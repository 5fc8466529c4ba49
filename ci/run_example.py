# SPDX-License-Identifier: Apache-2.0
"""Runs the Python examples of a Markdown file, in order and in one namespace: `python ci/run_example.py README.md`."""

import re
import sys
from pathlib import Path

page = Path(sys.argv[1])
blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
if not blocks:
    sys.exit(f"{page}: no Python example")
namespace: dict[str, object] = {"__name__": "__main__"}
for number, block in enumerate(blocks, 1):
    exec(compile(block, f"{page}, example {number}", "exec"), namespace)
print(f"{page}: {len(blocks)} example(s) ran")
