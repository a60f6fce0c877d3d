"""What cannot hold a cap is refused with the way that works."""

import pytest
import torch

import lowtide


def test_an_engine_of_deepspeed_is_refused():
    engine = type("DeepSpeedEngine", (torch.nn.Linear,), {"__module__": "deepspeed.runtime.engine"})(2, 2)
    with pytest.raises(lowtide.LowtideError, match=r"activation checkpointing.*fully_shard"):
        lowtide.cap(engine, "1GiB")
