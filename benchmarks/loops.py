"""What the arithmetic of a fused loop takes, beside the time in which memory moves its bytes.

    PYTHONPATH=src python benchmarks/loops.py                     # one GPU; rows in results/loops-h200.jsonl
    PYTHONPATH=src python benchmarks/loops.py --device cpu --elements 100000 --out rows.jsonl

Each function is compiled into one kernel that applies it several times to every element of a bfloat16 vector.
What one application more takes, once there are enough of them that arithmetic is the slower part, is written
as the bytes that a copy moves meanwhile, and beside it what `lowtide.work` counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from commit import commit
from lowtide.fusion import work

RESULTS = Path(__file__).parent / "results" / "loops-h200.jsonl"
FEW, MANY = 8, 24
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "aten.mul": lambda x: x * 0.999,
    "aten.exp": lambda x: torch.exp(x) * 0.3,
    "aten.log": lambda x: torch.log(x + 2.0),
    "aten.log1p": lambda x: torch.log1p(x),
    "aten.expm1": lambda x: torch.expm1(x) * 0.5,
    "aten.erf": torch.erf,
    "aten.tanh": torch.tanh,
    "aten.sigmoid": torch.sigmoid,
    "aten.sin": torch.sin,
    "aten.cos": torch.cos,
    "aten.pow": lambda x: torch.pow(x, 1.3),
    "aten.div": lambda x: 1.5 / (x + 1.0),
    "aten.sqrt": lambda x: torch.sqrt(x + 0.5),
    "aten.rsqrt": lambda x: torch.rsqrt(x + 1.0),
    "prims.inductor_random": lambda x: x + torch.rand_like(x),
}


def repeated(function: Callable[[Tensor], Tensor], times: int) -> Callable[[Tensor], Tensor]:
    def loop(x: Tensor) -> Tensor:
        y = x.float()
        for _ in range(times):
            y = function(y)
        return y.to(x.dtype)

    return torch.compile(loop, dynamic=False)


def seconds(run: Callable[[], object], device: str, repeats: int = 20) -> float:
    """The median time of a call, after some to warm up."""
    found = []
    for index in range(repeats + 3):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        found += [time.perf_counter() - start] if index >= 3 else []
    return statistics.median(found)


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--elements", type=int, default=2**27)
    parser.add_argument("--functions", type=lambda text: text.split(","), default=list(FUNCTIONS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    x = torch.rand(args.elements, dtype=torch.bfloat16, device=args.device)
    target = torch.empty_like(x)
    copy = seconds(lambda: target.copy_(x), args.device)
    bandwidth = 2 * x.numel() * x.element_size() / copy
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    print(f"{name}: a copy moves {bandwidth / 1e9:,.0f} GB/s")
    for function in args.functions:
        torch._dynamo.reset()
        few, many = (repeated(FUNCTIONS[function], times) for times in (FEW, MANY))
        times = [seconds(lambda run=run: run(x), args.device) for run in (few, many)]  # type: ignore[misc]
        each = (times[1] - times[0]) / (MANY - FEW) / x.numel()
        row = {
            "function": function,
            "bytes": each * bandwidth,
            "counted": work.INSTRUCTIONS.get(function, 1) / work.PER_BYTE,
            "bandwidth": bandwidth,
            "elements": x.numel(),
            "device": name,
            "torch": torch.__version__,
            "commit": commit(),
            "command": "PYTHONPATH=src python benchmarks/loops.py",
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(
            f"{function:24} {row['bytes']:6.2f} bytes per element, {row['counted']:6.2f} counted", flush=True
        )


if __name__ == "__main__":
    main()
