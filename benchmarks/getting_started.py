"""Run the code of docs/getting-started.md and write what it prints under each block.

python benchmarks/getting_started.py            # about two minutes on one core
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
import time
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "getting-started.md"
BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", flags=re.DOTALL)


def blocks(page: str) -> list[tuple[str, str]]:
    """The blocks of Python, each with the text under it that it prints."""
    return BLOCK.findall(page)


class Session:
    """Runs blocks in one namespace; what they print includes lowtide's lines on standard error."""

    def __init__(self) -> None:
        self.names: dict[str, object] = {}
        self.out = io.StringIO()  # one for all blocks: lowtide writes to the standard error of its import

    def printed(self, code: str) -> str:
        """Run a block and give what it prints."""
        before = self.out.tell()
        with contextlib.redirect_stdout(self.out), contextlib.redirect_stderr(self.out):
            exec(compile(code, PAGE.name, "exec"), self.names)
        return self.out.getvalue()[before:]


def rewritten(page: str) -> str:
    """The page with what its blocks print now."""
    session = Session()

    def again(found: re.Match[str]) -> str:
        start = time.perf_counter()
        said = session.printed(found[1])
        print(f"{time.perf_counter() - start:5.1f} s  {found[1].splitlines()[0]}")
        if (found[2] is None) != (not said):
            sys.exit(f"a block prints {said!r}, and under it is {found[2]!r}")
        return f"```python\n{found[1]}```\n" + (f"\n```text\n{said}```\n" if said else "")

    return BLOCK.sub(again, page)


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        new = rewritten(page)
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
