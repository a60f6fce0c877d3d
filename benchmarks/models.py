"""Which models train under a cap: many of `transformers`, `timm`, `diffusers` and graph nets, at toy sizes.

    PYTHONPATH=src python benchmarks/models.py                 # those that results/models.jsonl lacks
    PYTHONPATH=src python benchmarks/models.py bart vit        # these, anew
    PYTHONPATH=src python benchmarks/models.py --library timm --again

Each model is made from its config, with random weights, and one training step is run by `lowtide.verify` at
the smallest peak that can be planned, so that as much as possible is recomputed. A row says whether the step
was captured; whether loss, outputs, gradients, buffers and random state are plain PyTorch's bit by bit; the
predicted and the measured peak; and the seconds of CPU time from the call to the first loss, capture, plan
and pricing included. Libraries that are not installed are left out, and their rows stay as they are.
One thread: kernels that several threads add up in are not the same from run to run.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import lowtide
from commit import commit

FILE = Path(__file__).parent / "results" / "models.jsonl"
LIBRARIES = ("transformers", "timm", "diffusers", "torch_geometric")


class FirstLoss:
    """Picks the loss out of what a model returns, and knows when it was first asked for one."""

    def __init__(self) -> None:
        self.start = time.process_time()
        self.seconds: float | None = None

    def __call__(self, output: Any) -> torch.Tensor:
        if self.seconds is None:
            self.seconds = time.process_time() - self.start
        return output if isinstance(output, torch.Tensor) else output.loss


def row(make: Callable[[], tuple[torch.nn.Module, dict[str, Any]]]) -> dict[str, Any]:
    """What comes of one model under the smallest cap."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batch = make()
    model.train()
    loss = FirstLoss()
    try:
        found = lowtide.verify(model, kwargs=batch, budget="min", loss=loss, outside=0)
    except lowtide.LowtideError as error:
        return {"captured": False, "error": type(error).__name__, "said": without_folders(str(error))}
    return {
        "captured": True,
        "bitwise": found.equal,
        "different": list(found.different[:3]),
        "unstable": bool(found.unstable),
        "cap_changed_nothing": found.exact,
        "ops": len(found.plan.graph.ops),
        "uncapped": found.uncapped.peak,
        "predicted": found.predicted,
        "measured": found.measured,
        "seconds": round(loss.seconds or 0.0, 1),
    }


def without_folders(said: str) -> str:
    """The first line of an error, without the folders of this machine that lead to a library."""
    first = said.partition("\n")[0]
    return re.sub(r"/\S*/(?:site-packages|lib/python3\.\d+)/", "", first)


def entries(library: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The models of a library by their names."""
    if library == "transformers":
        import models_transformers as found
    elif library == "timm":
        import models_timm as found
    elif library == "diffusers":
        import models_diffusers as found
    else:
        import models_graphs as found
    yield from found.entries()


def only_imported() -> None:
    """Let torchvision be imported where its wheel was built for another torch, and has no operators.

    The libraries need it for their images, not for their models; what calls one of these operators fails.
    """
    try:
        version("torchvision")
    except PackageNotFoundError:
        return
    try:
        torch.ops.torchvision.nms  # noqa: B018  # asked for its name alone
    except AttributeError:
        for name in ("nms", "qnms"):
            _STUBS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_STUBS = torch.library.Library("torchvision", "FRAGMENT")


def installed(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def read() -> dict[tuple[str, str], dict[str, Any]]:
    rows = map(json.loads, FILE.read_text().splitlines()) if FILE.exists() else ()
    return {(each["library"], each["model"]): each for each in rows}


def write(rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    FILE.write_text("".join(json.dumps(rows[key]) + "\n" for key in sorted(rows)))


def told(made: dict[str, Any]) -> str:
    if not made["captured"]:
        return f"{made['error']}: {made['said']}"
    bits = "bitwise" if made["bitwise"] else f"differs in {', '.join(made['different'])}"
    gap = made["measured"] - made["predicted"]
    peak = "as predicted" if gap == 0 else f"{gap:+d} bytes of {made['predicted']}"
    return f"{bits}, {peak}, {made['seconds']} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="names of models; all without one")
    parser.add_argument("--library", choices=LIBRARIES, help="one library alone")
    parser.add_argument("--again", action="store_true", help="those that have a row, too")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    only_imported()
    rows = read()
    for library in [args.library] if args.library else LIBRARIES:
        if (release := installed(library)) is None:
            print(f"{library} is not installed: left out")
            continue
        listed = dict(entries(library))
        rows = {key: each for key, each in rows.items() if key[0] != library or key[1] in listed}
        for name, make in listed.items():
            if args.models and name not in args.models:
                continue
            if (library, name) in rows and not (args.again or args.models):
                continue
            try:
                made = row(make)
            except Exception as error:  # of the table: a config that this release of the library refuses
                print(f"{library}/{name} was not made: {type(error).__name__}: {error}", flush=True)
                continue
            about = {"library": library, "version": release, "torch": torch.__version__, "commit": commit()}
            rows[library, name] = {"model": name, **about, **made}
            write(rows)
            print(f"{library}/{name}: {told(made)}", flush=True)


if __name__ == "__main__":
    main()
