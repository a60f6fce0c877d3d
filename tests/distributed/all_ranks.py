"""One of two ranks: everything that tests want to know of two ranks, one part after the other.

Importing torch and Dynamo takes seconds: there is one process for each rank, and one process group
of gloo for all parts. `of_two_ranks` in `tests/conftest.py` starts this.
"""

import sys
from datetime import timedelta
from pathlib import Path

import ddp_ranks
import fsdp_scenarios
import torch
import two_ranks
from torch import distributed

from lighter import forget_compiled_code, spare_the_garbage_collector
from lowtide.capture.rewrites import collectives

PARTS = (ddp_ranks, fsdp_scenarios, two_ranks)  # the last one ends with a rank that does not come
LONGEST = timedelta(hours=1)


def main(folder, rank):
    torch.set_num_threads(1)
    collectives._MOST_SECONDS = 600.0  # a thread on a busy machine may let go of its tensors late
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=LONGEST)
    for part in PARTS:
        forget_compiled_code()
        spare_the_garbage_collector()
        out = Path(folder, part.__name__)
        out.mkdir(exist_ok=True)
        part.run(out, rank)
        distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
