"""Backpropagation through time: memory and time of `lowtide.scan` beside the ways that people have today.

    python benchmarks/sequences.py                          # on the CPU: the race for hidden=256, the figure
    python benchmarks/sequences.py --device cuda --hidden 256,2048 --parts race,long
    python benchmarks/sequences.py --table                  # the tables of the documentation, from the rows
    python benchmarks/sequences.py --plot                   # docs/sequences.svg, from the rows

The race: an LSTM over T=1000 steps with the loss folded in, as in Gruslys et al. 2016 (hidden 256, batch 64).
One forward and backward of: a plain loop over `nn.LSTMCell`, `torch.utils.checkpoint` in chunks of sqrt(T)
steps, `nn.LSTM` on the whole sequence, `lowtide.scan` and `lowtide.Recurrent(nn.LSTM)` at shares of what each
holds when it keeps every step. The modules give their outputs stacked, the others fold the loss in. `held` is
the peak less inputs, parameters and their gradients. The figure: runs per step and time against memory for
the three strategies, counted and measured, beside the theory. Last, a small cell over 100 000 steps.

A row is a JSON line; rows that the results file has are not made again unless `--again` is given.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from commit import commit
from lowtide.solve.sequence import forward_count
from row_files import append
from sequences_picture import picture
from sequences_results import RESULTS, Row, key, read, table

HERE = Path(__file__).parent
SHARES = ("5%", "2%", "1%")
LONG_BUDGET = "4MiB"
SLOTS = (5, 10, 20, 50, 100, 200, 500)
Step = Callable[[], Tensor]


class Race:
    """One LSTM and its sequence, and every way to differentiate the loss."""

    def __init__(self, hidden: int, batch: int, steps: int, device: str) -> None:
        torch.manual_seed(0)
        self.steps, self.device = steps, torch.device(device)
        self.module = nn.LSTM(hidden, hidden, device=device)
        self.cell = nn.LSTMCell(hidden, hidden, device=device)
        for name, parameter in self.cell.named_parameters():
            parameter.data = getattr(self.module, f"{name}_l0").data
        self.xs = torch.randn(steps, batch, hidden, device=device)
        self.start = torch.zeros(batch, hidden, device=device)

    def one(self, carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        carry = self.cell(x, carry)
        return carry, carry[0].square().mean()

    @property
    def parameters(self) -> list[Tensor]:
        return [*self.cell.parameters(), *self.module.parameters()]

    def loop(self) -> Tensor:
        return self.some((self.start, self.start), self.xs)[1]

    def some(self, carry: Any, xs: Tensor) -> tuple[Any, Tensor]:
        total = self.start.new_zeros(())
        for x in xs:
            carry, y = self.one(carry, x)
            total = total + y
        return carry, total

    def checkpoint(self) -> Tensor:
        carry: Any = (self.start, self.start)
        total = self.start.new_zeros(())
        for part in self.xs.split(round(self.steps**0.5)):
            carry, y = checkpoint(self.some, carry, part, use_reentrant=False)
            total = total + y
        return total

    def whole(self) -> Tensor:
        return self.module(self.xs)[0].square().mean() * self.steps

    def scan(self, budget: str, *, graphs: bool | Literal["auto"] = "auto") -> Tensor:
        init = (self.start, self.start)
        return lowtide.scan(self.one, init, self.xs, reduce="sum", budget=budget, graphs=graphs)[1]

    def recurrent(self, budget: str, *, graphs: bool | Literal["auto"] = "auto") -> Tensor:
        net = lowtide.Recurrent(self.module, budget=budget, graphs=graphs)
        return net(self.xs)[0].square().mean() * self.steps

    def ways(self) -> Iterator[tuple[str, str, Step]]:
        """Every tool with its setting."""
        yield "loop", "", self.loop
        yield "checkpoint", "sqrt(T)", self.checkpoint
        yield "nn.LSTM", "", self.whole
        for share in SHARES:
            yield "scan", share, partial(self.scan, share)
        if self.device.type == "cuda":
            for share in SHARES:
                yield "steps", share, partial(self.scan, share, graphs=False)
        for share in SHARES:
            yield "recurrent", share, partial(self.recurrent, share)
        if self.device.type == "cuda":
            for share in SHARES:
                yield "blocks", share, partial(self.recurrent, share, graphs=False)


def run(race: Race, step: Step) -> list[Tensor | None]:
    for parameter in race.parameters:
        parameter.grad = None
    step().backward()
    return [parameter.grad for parameter in race.parameters]


def measured(race: Race, step: Step, repeats: int) -> Row:
    """The peak of a step, what is held of it, and the median of its times."""
    start = time.perf_counter()
    run(race, step)
    set_up = time.perf_counter() - start
    before = there_before(race)
    peak = lowtide.measure(lambda: run(race, step), device=race.device).peak
    gradients = [parameter.grad for parameter in race.parameters if parameter.grad is not None]
    times = []
    for _ in range(repeats):
        synchronize(race.device)
        start = time.perf_counter()
        run(race, step)
        synchronize(race.device)
        times.append(time.perf_counter() - start)
    return {
        "peak": peak,
        "held": peak - before - bytes_of(gradients),
        "seconds": statistics.median(times),
        "set_up": set_up,
    }


def there_before(race: Race) -> int:
    """The bytes of inputs and parameters: those that count, which on a GPU are all that are there."""
    used = [parameter for parameter in race.parameters if parameter.grad is not None]
    for parameter in race.parameters:
        parameter.grad = None
    if race.device.type == "cuda":
        return torch.cuda.memory_allocated(race.device)
    return bytes_of([race.xs, race.start, *used])


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """What tensors take together, a storage that several have counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def distance(mine: list[Tensor | None], true: list[Tensor | None]) -> float:
    """How far gradients are from the loop's, relative to their norm."""
    pairs = zip((g for g in mine if g is not None), (g for g in true if g is not None), strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def race_rows(args: argparse.Namespace, known: set[tuple[Any, ...]]) -> Iterator[Row]:
    for hidden in args.hidden:
        race = Race(hidden, args.batch, args.steps, args.device)
        truth = run(race, race.loop)
        for tool, setting, step in race.ways():
            row: Row = {"what": "race", "hidden": hidden, "batch": args.batch, "steps": args.steps}
            row |= {"tool": tool, "setting": setting}
            if key(row) in known:
                continue
            try:
                row |= measured(race, step, args.repeats)
                row["distance"] = distance(run(race, step), truth)
            except (lowtide.LowtideError, torch.OutOfMemoryError) as error:
                row["error"] = str(error)
            yield row


def strategy_rows(args: argparse.Namespace, known: set[tuple[Any, ...]]) -> Iterator[Row]:
    """Runs and times of the three strategies."""
    hidden, batch = args.cell
    race = Race(hidden, batch, args.steps, args.device)
    init = (race.start, race.start)
    sizes = lowtide.scan_plan(race.one, init, race.xs, reduce="sum", budget="100%").sizes
    assert sizes is not None
    for slots in SLOTS:
        asks: dict[str, Row] = {keep: {"slots": slots} for keep in ("hidden", "internal")}
        asks["mixed"] = {"budget": sizes.work + slots * sizes.record}
        for strategy, asked in asks.items():
            row: Row = {"what": "strategy", "hidden": hidden, "batch": batch, "steps": args.steps}
            row |= {"tool": strategy, "setting": slots}
            if key(row) not in known and slots < args.steps:
                yield row | followed(race, strategy, asked, args.repeats)


def long_row(args: argparse.Namespace, known: set[tuple[Any, ...]]) -> Iterator[Row]:
    """A small cell over a hundred thousand steps, within a stated budget."""
    race = Race(16, 4, args.long, args.device)
    row: Row = {"what": "long", "hidden": 16, "batch": 4, "steps": race.steps, "tool": "scan"}
    row |= {"setting": LONG_BUDGET}
    if key(row) in known:
        return
    start = time.perf_counter()
    options: Row = {"reduce": "sum", "budget": LONG_BUDGET}
    plan = lowtide.scan_plan(race.one, (race.start, race.start), race.xs, **options)
    row["plan_seconds"] = time.perf_counter() - start
    row |= measured(race, lambda: lowtide.scan(race.one, (race.start, race.start), race.xs, **options)[1], 1)
    yield row | {"predicted": plan.peak, "keep_all": plan.keep_all, "planned_runs": plan.forward_count}


def followed(race: Race, strategy: Any, asked: Row, repeats: int) -> Row:
    """One strategy: its runs counted, its peak and its time beside the loop's in the same minute."""
    calls = 0

    def counted(carry: Any, x: Tensor) -> Any:
        nonlocal calls
        calls += 1
        return race.one(carry, x)

    options: Row = {"reduce": "sum", "strategy": strategy, **asked}
    init = (race.start, race.start)
    plan = lowtide.scan_plan(counted, init, race.xs, **options)

    def step() -> Tensor:
        return lowtide.scan(counted, init, race.xs, **options)[1]

    calls = 0
    run(race, step)
    runs = calls
    facts = measured(race, step, repeats)
    theory = None if strategy == "mixed" else forward_count(race.steps, asked["slots"], keep=strategy)
    loop = measured(race, race.loop, repeats)
    return {
        **facts,
        "runs": runs,
        "planned_runs": plan.forward_count,
        "theory": theory,
        "predicted": plan.peak,
        "keep_all": plan.keep_all,
        "loop_seconds": loop["seconds"],
        "loop_held": loop["held"],
    }


PARTS = {"race": race_rows, "strategies": strategy_rows, "long": long_row}


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--hidden", type=numbers, default=[256])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--cell", type=numbers, default=[128, 64], help="hidden,batch of the figure")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--long", type=int, default=100_000, help="steps of the long sequence")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--parts", type=lambda text: text.split(","), default=list(PARTS), help=", ".join(PARTS)
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--again", action="store_true", help="make rows anew that the results file has")
    parser.add_argument("--table", action="store_true", help="print the tables of the rows that are there")
    parser.add_argument("--plot", action="store_true", help="draw the figure of the rows that are there")
    parser.add_argument("--figure", type=Path, default=HERE.parent / "docs" / "sequences.svg")
    args = parser.parse_args()
    path = args.out or RESULTS / f"sequences-{'h200' if args.device == 'cuda' else 'cpu'}.jsonl"
    if args.table:
        print(table(read(path)))
    elif args.plot:
        args.figure.write_text(picture(read(path)), encoding="utf-8")
    else:
        facts = {"device": args.device, "torch": torch.__version__, "threads": torch.get_num_threads()}
        if args.device == "cuda":
            facts["device"] = torch.cuda.get_device_name()
        known = set() if args.again else {key(row) for row in read(path)}
        for part in args.parts:
            for row in PARTS[part](args, known):
                row |= facts | {"commit": commit()}
                print(json.dumps(row), flush=True)
                append(row, path)


if __name__ == "__main__":
    main()
