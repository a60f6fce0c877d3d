"""Random modules at 100 %, 50 % and the smallest peak: how many, and what came of them.

    PYTHONPATH=src:tests python benchmarks/random_modules.py --cases 1000            # the seed is printed
    PYTHONPATH=src:tests python benchmarks/random_modules.py --cases 1000 --seed 4   # these again

The modules are those of `make fuzz` (`tests/fuzz/modules_part.py`), which ends at the first that does not
hold; here all of them run, and what came of each budget is counted. One row for every 100 in
`results/random_modules.jsonl`, with the cases that were wrong.
"""

from __future__ import annotations

import argparse
import json
import logging
import secrets
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from commit import commit
from fuzz.modules_part import BUDGETS, outcomes, verdict

FILE = Path(__file__).parent / "results" / "random_modules.jsonl"
EACH = 100
"""The cases of one row."""


def row(seed: int, first: int, cases: int) -> dict[str, Any]:
    """What came of so many modules at each budget."""
    counts: dict[str, Counter[str]] = {budget: Counter() for budget in BUDGETS}
    wrong: list[str] = []
    for number in range(first, first + cases):
        case = seed + 1000 * number
        try:
            for budget, found, model, x in outcomes(case):
                said = "refused" if found is None else verdict(found, model, x)
                counts[budget][said] += 1
                if said == "WRONG":
                    print(f"case {case} at {budget}: {found}\n{model}", flush=True)
                    wrong.append(f"{case} at {budget}")
        except Exception:  # of the count: the others are to run, too
            traceback.print_exc()
            wrong.append(f"{case}: an error")
    return {
        "first": first,
        "cases": cases,
        **{budget: dict(counts[budget]) for budget in BUDGETS},
        "wrong": wrong,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="go on with this one")
    parser.add_argument("--seed", type=int)
    asked = parser.parse_args()
    seed = secrets.randbits(32) if asked.seed is None else asked.seed
    print(f"seed {seed}", flush=True)
    logging.getLogger("lowtide").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    about = {"seed": seed, "torch": torch.__version__, "commit": commit()}
    for first in range(asked.first, asked.first + asked.cases, EACH):
        start = time.process_time()
        made = row(seed, first, min(EACH, asked.first + asked.cases - first))
        seconds = round(time.process_time() - start)
        with FILE.open("a") as file:
            file.write(json.dumps({**about, **made, "seconds": seconds}) + "\n")
        print(json.dumps(made), flush=True)


if __name__ == "__main__":
    main()
