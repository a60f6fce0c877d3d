"""When DDP's all-reduce starts: the share of the backward that is over when each bucket leaves.

python benchmarks/ddp_overlap.py            # appends to results/ddp_overlap.jsonl
python benchmarks/ddp_overlap.py --print    # appends nothing

A transformer under DistributedDataParallel, plain and capped, in one run: on a GPU by one rank over NCCL,
else by two over gloo. A communication hook notes when it is called for each bucket; on a GPU it records an
event of the stream that computes, so that the share is of the device's time, not of the launches'. `same`
says that the weights after all steps are those of the plain loop, bit for bit.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowtide
from commit import commit

RESULTS = Path(__file__).parent / "results" / "ddp_overlap.jsonl"
TOOLS = (None, None, "100%", "80%", "60%", "min")
"""The budgets; plain twice, to see whether its weights come out the same."""

STEPS = 12


class Model(nn.Module):
    """An encoder with a loss."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        options = {"dim_feedforward": 4 * width, "batch_first": True, "activation": "gelu", "dropout": 0.0}
        self.layers = nn.Sequential(*(nn.TransformerEncoderLayer(width, 8, **options) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).float().square().mean()


class Clock:
    """Moments of a backward: of the stream that computes, or of the host."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.moments: list[Any] = []

    def note(self) -> None:
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.moments.append(event)
        else:
            self.moments.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """The moments since the first one."""
        first, *rest = self.moments
        if not self.on_gpu:
            return [moment - first for moment in rest]
        torch.cuda.synchronize()
        return [first.elapsed_time(moment) / 1e3 for moment in rest]


def row(budget: str | None, device: torch.device, views: bool) -> tuple[dict[str, Any], list[torch.Tensor]]:
    on_gpu = device.type == "cuda"
    width, layers, shape = (1024, 12, (16, 512)) if on_gpu else (64, 8, (4, 64))
    torch.manual_seed(0)
    model = Model(width, layers).to(device, torch.bfloat16 if on_gpu else torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if budget is not None:
        lowtide.cap(model, budget, optimizer=optimizer)
    outer = DistributedDataParallel(model, bucket_cap_mb=25 if on_gpu else 0.1, gradient_as_bucket_view=views)
    clock = Clock(device)

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP takes no other annotations than its own
        clock.note()
        buffer = bucket.buffer().div_(torch.distributed.get_world_size())
        return torch.distributed.all_reduce(buffer, async_op=True).get_future().then(lambda f: f.value()[0])

    outer.register_comm_hook(None, hook)
    shares: list[float] = []
    backward, step, peak = [], [], 0
    for number in range(STEPS):
        torch.manual_seed(number)
        x = torch.randn(*shape, width, device=device, dtype=next(model.parameters()).dtype)

        def train(x: torch.Tensor = x) -> None:
            loss = outer(x)
            clock.moments.clear()
            clock.note()
            loss.backward()
            clock.note()

        found = lowtide.measure(train, device=device)
        *starts, whole = clock.seconds()
        if number >= STEPS // 2:
            shares = [round(start / whole, 3) for start in starts]
            backward.append(whole)
            step.append(found.seconds)
            peak = max(peak, found.peak)
        optimizer.step()
        optimizer.zero_grad()
    facts = {
        "tool": "plain" if budget is None else f"lowtide {budget}",
        "views": views,
        "buckets": shares,
        "peak": peak,
        "predicted": None if budget is None else lowtide.plan_of(outer).allocated,  # type: ignore[union-attr]
        "backward_ms": round(1e3 * statistics.median(backward), 2),
        "step_ms": round(1e3 * statistics.median(step), 2),
    }
    return facts, [p.detach().clone() for p in model.parameters()]


def work(rank: int, world: int, store: str, printed_only: bool) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
    )
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    for views in (False, True):
        plain: list[torch.Tensor] = []
        for budget in TOOLS:
            gc.collect()  # DDP and its module refer to each other
            try:
                facts, weights = row(budget, device, views)
            except lowtide.BudgetTooSmall as error:
                print(error)
                continue
            plain = plain or weights
            facts |= {"same": all(map(torch.equal, weights, plain)), "ranks": world, "device": name}
            facts |= {"torch": torch.__version__, "commit": commit()}
            if rank == 0:
                print(json.dumps(facts), flush=True)
                if not printed_only:
                    with RESULTS.open("a") as file:
                        file.write(json.dumps(facts) + "\n")
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--print", action="store_true", help="append nothing to the results")
    chosen = parser.parse_args()
    world = 1 if torch.cuda.is_available() else 2
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, f"{folder}/store", chosen.print)
        torch.multiprocessing.spawn(work, arguments, nprocs=world)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
