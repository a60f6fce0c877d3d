"""The graphs that planners are compared on: captured training steps of well-known networks, no GPU needed.

    PYTHONPATH=src python benchmarks/corpus.py                    # captures what is missing, prints the table
    PYTHONPATH=src python benchmarks/corpus.py --only unet gpt2_medium --again
    PYTHONPATH=src python benchmarks/corpus.py --list

Models and batches are on the meta device and the step is traced under fake tensors, so nothing is computed
or allocated. Prices are the roofline of an H200. Graphs are written to `benchmarks/corpus/NAME.json` and
read from there afterwards; `captures.jsonl` beside them has what a graph does not say of itself.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import lowtide
from lowtide.errors import LowtideError
from lowtide.plans.keep_all import keep_all
from lowtide.plans.simulator import simulate
from networks import CORPUS
from synthetic import scaled

__all__ = ["CORPUS", "PAPER", "load", "names", "scaled"]

FOLDER = Path(__file__).parent / "corpus"
DEVICE = "H200"


@dataclass(frozen=True)
class PaperRow:
    """A row of table 1 of Kusumoto et al. 2019: GB of peak memory and the paper's own percentages."""

    batch: int
    vanilla: float
    best: float
    best_saved: int
    chen: float
    chen_saved: int


PAPER = {
    "pspnet": PaperRow(2, 9.4, 2.7, 71, 4.0, 58),
    "unet": PaperRow(8, 9.1, 4.7, 48, 7.4, 18),
    "resnet50": PaperRow(96, 8.9, 3.4, 62, 3.7, 59),
    "resnet152": PaperRow(48, 9.2, 2.3, 75, 2.4, 74),
    "vgg19": PaperRow(64, 7.0, 4.5, 36, 4.7, 34),
    "densenet161": PaperRow(32, 8.5, 1.6, 81, 1.8, 79),
    "googlenet": PaperRow(256, 8.5, 5.2, 39, 6.5, 24),
}
"""The seven networks of the paper; parameters are included in its figures, liveness is applied."""


@dataclass(frozen=True)
class Capture:
    """What is kept of a capture besides its graph."""

    name: str
    parameters: int
    capture_seconds: float
    lowtide: str
    torch: str


def names() -> list[str]:
    """The networks of the corpus."""
    return list(CORPUS)


def load(name: str, *, folder: Path = FOLDER, again: bool = False) -> lowtide.Graph:
    """The graph of a network: from its file, captured first where there is none (or `again` asks for it)."""
    if name not in CORPUS:
        raise LowtideError(f"the corpus has no network {name!r}; it has {', '.join(CORPUS)}")
    path = folder / f"{name}.json"
    if again or not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write(capture(name, folder), path)
    return lowtide.Graph.from_json(path.read_text())


def capture(name: str, folder: Path) -> lowtide.Graph:
    """Trace a network, and note in the folder how long it took."""
    with torch.device("meta"):
        model, batch = CORPUS[name].build()
    start = time.process_time()  # tracing has one thread; the machine may have other work
    graph = lowtide.plan(model, *batch, device=DEVICE).graph
    seconds = time.process_time() - start
    torch._dynamo.reset()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    noted = Capture(name, parameters, round(seconds, 2), lowtide.__version__, torch.__version__)
    with (folder / "captures.jsonl").open("a") as file:
        file.write(json.dumps(asdict(noted)) + "\n")
    return graph


def write(graph: lowtide.Graph, path: Path) -> None:
    """Write the graph in one go: another process may be reading the folder."""
    draft = path.with_suffix(".draft")
    draft.write_text(graph.to_json())
    draft.replace(path)


def captures(folder: Path) -> dict[str, Capture]:
    """The last note on each network of the folder."""
    path = folder / "captures.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {noted.name: noted for noted in (Capture(**json.loads(line)) for line in lines)}


HEAD = f"{'network':14} {'batch':>13} {'params, M':>10} {'ops':>6} {'fw':>6} {'bw':>6} "
HEAD += f"{'peak, GB':>9} {'paper':>6} {'step, ms':>9} {'capture, s':>11}"


def row(name: str, graph: lowtide.Graph, noted: Capture | None) -> str:
    """A line of the table; the peak is that of keeping everything, in 10^9 bytes as in the paper."""
    forward = sum(op.phase == "forward" for op in graph.ops)
    timeline = simulate(graph, keep_all(graph))
    paper = f"{PAPER[name].vanilla:.1f}" if name in PAPER else ""
    parameters, seconds = (
        (f"{noted.parameters / 1e6:.1f}", f"{noted.capture_seconds:.1f}") if noted else ("?", "?")
    )
    return (
        f"{name:14} {CORPUS[name].batch:>13} {parameters:>10} {len(graph.ops):6} {forward:6} "
        f"{len(graph.ops) - forward:6} {timeline.peak / 1e9:9.2f} {paper:>6} {timeline.seconds * 1e3:9.1f} "
        f"{seconds:>11}"
    )


def print_table(chosen: Iterable[str], folder: Path, *, again: bool) -> None:
    print(HEAD)
    for name in chosen:
        graph = load(name, folder=folder, again=again)
        print(row(name, graph, captures(folder).get(name)), flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", default=names(), help="these networks alone")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the graphs")
    parser.add_argument("--again", action="store_true", help="capture also what the folder has already")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    args = parser.parse_args(arguments)
    if args.list:
        print("\n".join(f"{name:14} {network.batch}" for name, network in CORPUS.items()))
        return
    try:
        print_table(args.only, args.out, again=args.again)
    except LowtideError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
