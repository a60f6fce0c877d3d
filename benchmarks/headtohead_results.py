"""The rows of the head-to-head: which there are, how they are written, read and judged. No torch here.

A row is a JSON line, known by its model, tool and setting; where a file has several of a kind the last one
counts. A row has a `peak` and `milliseconds`; or it was `refused` (no plan fits; `smallest` is the least peak
that was found); or it has an `error` in words.

`dominated` gives the verdict: for every point of another tool, is there a point of Lowtide with no more peak
and no more time? Two per cent count as equal. A point of Lowtide with wrong gradients does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from row_files import Row

Key = tuple[str, str, str]

RESULTS = Path(__file__).parent / "results" / "headtohead-h200.jsonl"

MODELS = {
    "gpt": "GPT, 12 layers, d=1024, 16 x 1024 tokens, bf16",
    "llama_1b": "Llama-like 1B, 8 x 2048 tokens, bf16",
    "vit_b16": "ViT-B/16, batch 256, bf16",
    "bert_base": "BERT-base with dropout, 64 x 512 tokens, bf16",
    "resnet50": "ResNet-50, batch 96, fp32 with TF32",
    "resnet50_184": "ResNet-50, batch 184, fp32 with TF32",
    "unet": "U-Net with dropout, batch 8, fp32 with TF32",
    "densenet161": "DenseNet-161, batch 32, fp32 with TF32",
}
"""The training steps, in words."""

SHARES = ("uncapped", "80%", "60%", "45%", "35%", "25%", "min")
TOOLS: dict[str, tuple[str, ...]] = {
    "eager": ("",),
    "checkpoint": ("",),
    "selective": ("",),
    "compile": ("1.0", "0.7", "0.5", "0.3", "0.1", "0.0"),
    "lowtide-eager": SHARES,
    "lowtide-inductor": SHARES,
}
"""The tools and their settings; the first setting of a tool is the one that keeps the most.

Lowtide takes a number of MiB as well, as in "5394MiB": the peak of another tool, to stand beside it.
"""

NAMES = {
    "eager": "PyTorch",
    "checkpoint": "torch.utils.checkpoint per block",
    "selective": "selective checkpointing",
    "compile": "torch.compile, activation_memory_budget",
    "lowtide-eager": "Lowtide, eager",
    "lowtide-inductor": "Lowtide, Inductor",
}
OURS = ("lowtide-eager", "lowtide-inductor")
SLACK = 0.02
BROKEN = 75
"""Exit status of a process whose device gives nothing but errors any more; a new process may go on."""
VANILLA_SHARE = 0.45


def key(row: Row) -> Key:
    return row["model"], row["tool"], row["setting"]


def keys(models: Iterable[str], tools: Sequence[str], settings: Sequence[str] | None = None) -> list[Key]:
    """The rows that are asked for; `settings` choose among those of the tools that have any."""
    more = [setting for setting in settings or () if is_size(setting)]
    return [
        (model, tool, setting)
        for model in models
        for tool in tools
        for setting in (*TOOLS[tool], *(more if tool in OURS else ()))
        if not (settings and setting) or setting in settings
    ]


def is_size(setting: str) -> bool:
    """Whether a setting is a number of MiB."""
    return setting.endswith("MiB")


def latest(rows: Iterable[Row]) -> list[Row]:
    """The last row of each kind, in the order of the models, the tools and their settings."""
    found = {key(row): row for row in rows}
    sizes = sorted({setting for *_, setting in found if is_size(setting)}, key=lambda size: -int(size[:-3]))
    every = [setting for settings in TOOLS.values() for setting in settings]
    return [found[known] for known in keys(MODELS, list(TOOLS), [*every, *sizes]) if known in found]


def title(model: str, rows: Iterable[Row]) -> str:
    """A model in words, for its rows."""
    return MODELS[model] + (", a tiny version" if any(row.get("tiny") for row in rows) else "")


def points(rows: Iterable[Row]) -> list[Row]:
    """The rows that ran."""
    return [row for row in rows if "milliseconds" in row]


@dataclass(frozen=True)
class Verdict:
    """A point of another tool, the point of Lowtide nearest to it (if any), and whether that is no worse."""

    theirs: Row
    ours: Row | None
    met: bool

    def __str__(self) -> str:
        if self.ours is None:
            return f"{point_text(self.theirs)}: NOT MET, no point of Lowtide"
        word = "met by" if self.met else "NOT MET, nearest is"
        return f"{point_text(self.theirs)}: {word} {point_text(self.ours)} ({ratios(self.ours, self.theirs)})"


def dominated(rows: Iterable[Row]) -> list[Verdict]:
    """For every point of another tool, the point of Lowtide that is at most so large and so slow."""
    rows = points(latest(rows))
    verdicts = []
    for theirs in rows:
        if theirs["tool"] in OURS:
            continue
        mine = [row for row in rows if row["model"] == theirs["model"] and counts(row)]
        ours = min(mine, key=lambda row: distance(row, theirs), default=None)
        met = ours is not None and distance(ours, theirs) <= 1 + SLACK
        verdicts.append(Verdict(theirs, ours, met))
    return verdicts


def beside_unmet(rows: Iterable[Row]) -> list[Key]:
    """Rows of Lowtide at the peaks of those points of other tools that no row of it meets yet."""
    unmet = [verdict.theirs for verdict in dominated(rows) if not verdict.met]
    return [(row["model"], "lowtide-inductor", f"{row['peak'] >> 20}MiB") for row in unmet]


def counts(row: Row) -> bool:
    return row["tool"] in OURS and row.get("gradients") != "wrong"


def distance(ours: Row, theirs: Row) -> float:
    """The worse of the two ratios: at most one where ours is no larger and no slower."""
    return max(ours["peak"] / theirs["peak"], ours["milliseconds"] / theirs["milliseconds"])


def ratios(ours: Row, theirs: Row) -> str:
    peak, time = (ours[name] / theirs[name] - 1 for name in ("peak", "milliseconds"))
    return f"peak {peak:+.1%}, time {time:+.1%}"


def point_text(row: Row) -> str:
    setting = f" {row['setting']}" if row["setting"] else ""
    wrong = ", wrong gradients" if row.get("gradients") == "wrong" else ""
    return f"{row['tool']}{setting} [{mib(row['peak'])} MiB, {row['milliseconds']:.1f} ms{wrong}]"


def mib(size: float) -> str:
    return f"{size / 2**20:,.0f}"


def verdict_text(rows: Iterable[Row]) -> str:
    """The verdicts by model, and what lies below all points of the others."""
    rows = latest(rows)
    verdicts = dominated(rows)
    lines = []
    for model in MODELS:
        found = [verdict for verdict in verdicts if verdict.theirs["model"] == model]
        if found:
            met = sum(verdict.met for verdict in found)
            name = title(model, (verdict.theirs for verdict in found))
            lines += [f"{name}: {met} of {len(found)} points met", *(f"  {one}" for one in found)]
            lines += [f"  {line}" for line in extremes([row for row in rows if row["model"] == model])]
    total = sum(verdict.met for verdict in verdicts)
    return "\n".join([*lines, f"{total} of {len(verdicts)} points of the other tools are met"])


def extremes(rows: Sequence[Row]) -> list[str]:
    """Of one model: the smallest peaks of both sides, and Lowtide's time at 45 % of eager's peak."""
    found = points(rows)
    ours, others = [row for row in found if counts(row)], [row for row in found if row["tool"] not in OURS]
    if not ours or not others:
        return []
    least, theirs = (min(side, key=lambda row: row["peak"]) for side in (ours, others))
    below = "below" if least["peak"] < theirs["peak"] else "NOT BELOW"
    lines = [f"smallest: {point_text(least)}, {below} the others' {point_text(theirs)}"]
    base = next((row for row in others if row["tool"] == "eager"), None)
    if base is not None:
        fit = [row for row in ours if row["peak"] <= VANILLA_SHARE * base["peak"]]
        fast = min(fit, key=lambda row: row["milliseconds"], default=None)
        text = "no point" if fast is None else f"{point_text(fast)} ({ratios(fast, base)} against eager)"
        lines.append(f"fastest at {VANILLA_SHARE:.0%} of eager's peak: {text}")
    return lines
