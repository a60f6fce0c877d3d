"""What a process of the head-to-head does: the rows of one model, one after the other.

Gradients are compared with those of plain PyTorch for the same batch and seed. Where the model has dropout,
compiled code draws other random numbers by design; then the reference is the same tool at its first setting
(a budget of 1.0, no cap) with the same seed, which draws the same ones. The row of that setting says "n/a".
"""

from __future__ import annotations

import gc
import os
import platform
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

import lowtide
from commit import commit
from headtohead_measure import Outcome, Stand, measured
from headtohead_models import SUBJECTS
from headtohead_others import standing_still
from headtohead_results import BROKEN, OURS, TOOLS, Key, key
from headtohead_tools import Call, tool
from headtohead_turn import Turn, compile_beside, measure_prices_in
from row_files import Row, append, read

FIRST_STEPS = 3

PAUSES = (0.0, 10.0, 20.0)
"""Seconds before each new trial of what ran out of memory: others give theirs back."""


class Worker:
    """One model and the tools that are tried on it; rows go to the file as they are done."""

    def __init__(self, model: str, out: Path, *, device: str, tiny: bool, steps: int) -> None:
        self.name, self.out, self.steps, self.tiny = model, out, steps, tiny
        self.parent = os.getppid()  # when it is gone, nobody would stop this process
        self.turn = Turn()
        measure_prices_in(self.turn)
        compile_beside(self.turn)
        if device == "cuda":
            torch.set_float32_matmul_precision("high")
        with self.turn.beside_others():
            self.stand = Stand(*SUBJECTS[model].build(device, tiny=tiny))
            self.stand.tidy()
        self.first: dict[str, Outcome] = {}

    def work(self, wanted: Iterable[Key], until: float) -> None:
        """The rows that are wanted, until it is too late to start one."""
        for _, name, setting in wanted:
            if time.time() >= until or os.getppid() != self.parent:
                return
            row = self.facts(name, setting) | self.attempt(name, setting)
            append(row, self.out)
            say(row, self.turn)
            gc.collect()
            self.stand.tidy()
            self.check_device()

    def attempt(self, name: str, setting: str) -> Row:
        """What is found, or why nothing is. Other processes may have had the memory: that is tried again."""
        try:
            return self.measure(name, setting)
        except Exception as error:
            row = refusal(error)
        for pause in PAUSES if "out of memory" in row.get("error", "") else ():
            self.stand.tidy()
            time.sleep(pause)
            try:
                with self.turn:
                    return self.measure(name, setting)
            except Exception as error:
                row = refusal(error)
        return row

    def measure(self, name: str, setting: str) -> Row:
        stand, row = self.stand, {}
        reference = self.reference(name, setting)
        with tool(name, stand.model, setting, uncapped=self.uncapped(name, setting)) as call:
            row["setup_seconds"] = self.set_up(call)
            with self.turn:
                row |= self.check(name, call, reference)
                stand.tidy()
                with standing_still():
                    row |= measured(stand, call, self.steps)
                stand.tidy()
            if name in OURS:
                row |= of_plan(lowtide.plan_of(stand.model))
        return row

    def check(self, name: str, call: Call, reference: Outcome | None) -> Row:
        """How the gradients compare; without a reference they become the one of the other settings."""
        found = self.stand.outcome(call)
        if reference is None:
            self.first[name] = found.kept()
            return {"gradients": "n/a"}
        return self.stand.compare(found, reference)

    def set_up(self, call: Call) -> float:
        """Seconds of the first steps, without those that it waited for others.

        A step of Lowtide that was over its budget is compiled again in the next one.
        """
        gc.collect()
        self.stand.tidy()
        start, waited = time.perf_counter(), self.turn.waited
        with self.turn.beside_others():
            for _ in range(FIRST_STEPS):
                self.stand.step(call)
                self.stand.finish()
        seconds = time.perf_counter() - start - (self.turn.waited - waited)
        self.stand.tidy()
        return round(seconds, 2)

    def reference(self, name: str, setting: str) -> Outcome | None:
        """What the gradients are compared with; None at the setting that others are compared with."""
        own = self.stand.random and name in ("compile", "lowtide-inductor")
        source = name if own else "eager"
        base = TOOLS[source][0]
        if own and setting == base:
            return None
        if source not in self.first:
            with tool(source, self.stand.model, base) as call:
                if own:
                    self.set_up(call)
                with self.turn:
                    self.first[source] = self.stand.outcome(call).kept()
                    self.stand.tidy()
        return self.first[source]

    def uncapped(self, name: str, setting: str) -> int | None:
        """The peak that a share is taken of: that of the row without a cap."""
        if not setting.endswith("%"):
            return None
        wanted = (self.name, name, TOOLS[name][0])
        rows = [row for row in read(self.out) if key(row) == wanted and "peak" in row]
        return rows[-1]["peak"] if rows else None

    def facts(self, name: str, setting: str) -> Row:
        cuda = self.stand.device.type == "cuda"
        row = {
            "model": self.name,
            "tool": name,
            "setting": setting,
            "dtype": str(self.stand.dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name() if cuda else platform.machine(),
            "torch": torch.__version__,
            "lowtide": lowtide.__version__,
            "commit": commit(),
            "command": self.command(name, setting),
        }
        return {**row, "tiny": True} if self.tiny else row

    def command(self, name: str, setting: str) -> str:
        parts = ["PYTHONPATH=src python benchmarks/headtohead.py --models", self.name, "--tools", name]
        parts += ["--settings", setting] if setting else []
        parts += ["--steps", str(self.steps)]
        parts += [] if self.stand.device.type == "cuda" else ["--device", "cpu"]
        return " ".join([*parts, "--tiny"] if self.tiny else parts)

    def check_device(self) -> None:
        """End the process when an error has made the device useless to it."""
        try:
            self.stand.finish()
        except RuntimeError:
            sys.exit(BROKEN)


def of_plan(plan: lowtide.Plan | None) -> Row:
    if plan is None:
        return {}
    return {
        "predicted_peak": plan.allocated,
        "predicted_reserved": plan.reserved,
        "budget": plan.budget,
        "predicted_extra": plan.extra,
    }


def refusal(error: Exception) -> Row:
    """The row of a budget that cannot be met, or of a failure in words."""
    if isinstance(error, lowtide.BudgetTooSmall):
        return {"refused": True, "budget": error.budget, "smallest": error.smallest}
    return {"error": without_paths(f"{type(error).__name__}: {error}")}


def without_paths(text: str) -> str:
    """The first lines of an error, on one, with the names of files but not where they lie."""
    text = re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", text)
    return " ".join(text.split())[:300]


def say(row: Row, turn: Turn) -> None:
    """A line for who watches; the seconds are those of the process, of its turns, and that it waited."""
    clock = f"[{time.perf_counter() - turn.began:3.0f} s, {turn.had:3.0f} in turn, {turn.waited:3.0f} waited]"
    where = f"{clock} {row['model']:13} {row['tool']:17} {row['setting']:9}"
    if "milliseconds" not in row:
        print(where, row.get("error") or f"refused, smallest {row['smallest'] / 2**20:.1f} MiB", flush=True)
        return
    predicted = row.get("predicted_peak")
    gap = f"({row['peak'] / predicted - 1:+.2%} of predicted)" if predicted else ""
    print(
        f"{where} {row['peak'] / 2**20:9.1f} MiB {gap:25} {row['milliseconds']:8.2f} ms "
        f"set-up {row['setup_seconds']:.1f} s, gradients {row['gradients']}",
        flush=True,
    )
