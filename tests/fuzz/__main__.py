"""`make fuzz`: cases of every part in turn until the time is over; the first that does not hold ends it.

python -m fuzz --minutes 10                   # with tests/ on PYTHONPATH; the seed is printed
python -m fuzz --part files --case 123        # that one again
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import secrets
import sys
import tempfile
import time
import traceback
import warnings

PARTS = ("graphs", "files", "modules", "sanitized")


def main() -> int:
    """Run cases and return the exit status."""
    asked = _parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="lowtide-fuzz-") as folder:
        os.environ["LOWTIDE_CACHE"] = folder
        return _asked_for(asked)


def _asked_for(asked: argparse.Namespace) -> int:
    logging.getLogger("lowtide").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    if asked.case is not None:
        return 0 if _holds(asked.part or PARTS[0], asked.case) else 1
    seed = secrets.randbits(32) if asked.seed is None else asked.seed
    parts = _runnable([asked.part] if asked.part else list(PARTS))
    print(f"seed {seed}, {asked.minutes:g} minutes: {', '.join(parts)}", flush=True)
    return _run(parts, seed, time.monotonic() + 60 * asked.minutes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fuzz")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, help="of the run (default: another one each time)")
    parser.add_argument("--part", choices=PARTS, help="one part alone")
    parser.add_argument("--case", type=int, help="one case again")
    return parser


def _runnable(parts: list[str]) -> list[str]:
    found = []
    for part in parts:
        missing = getattr(importlib.import_module(f"fuzz.{part}_part"), "missing", lambda: "")()
        if missing:
            print(f"without {part}: it {missing}")
        else:
            found.append(part)
    return found


def _run(parts: list[str], seed: int, end: float) -> int:
    """Cases in turn, each part for about as long as the others."""
    spent, count, start = dict.fromkeys(parts, 0.0), dict.fromkeys(parts, 0), time.monotonic()
    while time.monotonic() < end:
        part = min(parts, key=spent.__getitem__)
        begun = time.monotonic()
        if not _holds(part, seed + 1000 * count[part]):
            return 1
        spent[part] += time.monotonic() - begun
        count[part] += 1
    cases = ", ".join(f"{count[part]} of {part} ({spent[part]:.0f} s)" for part in parts)
    print(f"all hold after {time.monotonic() - start:.0f} s: {cases}")
    return 0


def _holds(part: str, case: int) -> bool:
    try:
        importlib.import_module(f"fuzz.{part}_part").case(case)
    except KeyboardInterrupt:
        raise
    except BaseException:
        traceback.print_exc()
        print(f"\nthis case again: python -m fuzz --part {part} --case {case}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
