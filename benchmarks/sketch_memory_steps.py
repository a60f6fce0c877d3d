"""The step of the memory benchmark of sketches, and the ways to run it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from encoders import Transformers
from headtohead_measure import Stand, calm, cpu_times, cuda_times, kernels
from headtohead_tools import Call
from sketch_memory_results import Group, Row, Way

SIZES = {"mrpc": (128, 128), "qnli": (16, 512), "sst2": (256, 64)}
TINY_SIZES = {"mrpc": (16, 16), "qnli": (4, 64), "sst2": (32, 8)}
BASE = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1}
SMALL = {
    **BASE,
    "vocab_size": 100,
    "max_position_embeddings": 66,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 128,
}


class Training(Stand):
    """A model, a batch and AdamW, whose state is there from the start."""

    def __init__(self, model: nn.Module, batch: tuple[Tensor, ...]) -> None:
        super().__init__(model, batch)
        cuda = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True, capturable=cuda)
        self.step(model)
        self.tidy()

    def step(self, call: Call) -> None:
        if isinstance(call, Recorded):
            call.graph.replay()
            return
        self.clear()
        call(*self.batch).backward()
        self.optimizer.step()

    @property
    def held(self) -> list[Tensor]:
        states = [part for state in self.optimizer.state.values() for part in state.values()]
        return [*self.model.parameters(), *self.model.buffers(), *self.batch, *states]

    @classmethod
    def of(cls, group: Group, device: str, *, tiny: bool) -> Training:
        torch.manual_seed(0)
        options: dict[str, Any] = dict(SMALL if tiny else BASE)
        options |= {"attn_implementation": attention(group), "problem_type": "single_label_classification"}
        with torch.device(device):
            model = Transformers("RobertaForSequenceClassification", "RobertaConfig", **options)
            size = (TINY_SIZES if tiny else SIZES)[group.case]
            ids, labels = torch.randint(2, options["vocab_size"], size), torch.randint(2, size[:1])
        return cls(model.to(getattr(torch, group.dtype)).train(), (ids, labels))


class Recorded:
    """A whole step as one CUDA graph, so that all of its kernels are launched at once."""

    def __init__(self, stand: Training, call: Call) -> None:
        beside = stream_for_graphs()
        with torch.cuda.stream(beside):
            stand.step(call)
        beside.synchronize()
        stand.tidy()
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.reset_peak_memory_stats()
        with torch.cuda.graph(self.graph, stream=beside):
            stand.step(call)
        self.peak = torch.cuda.max_memory_allocated()

    def __call__(self, *batch: Tensor) -> Tensor:
        raise TypeError("a recorded step is replayed as a whole")


@cache
def stream_for_graphs() -> torch.cuda.Stream:
    """One for all of them: cuBLAS takes workspaces for every stream that it meets, and keeps them."""
    return torch.cuda.Stream()


def attention(group: Group) -> str:
    """The name by which transformers knows the attention of a group.

    Some of its versions make a mask for the fused one while they are traced, though there is no padding. With
    its strides, torch then falls back to attention that keeps its weights. Here none is made.
    """
    if group.attention == "eager":
        return "eager"
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("unpadded", sdpa_attention_forward)
    AttentionMaskInterface.register("unpadded", lambda *args, **kwargs: None)
    return "unpadded"


def sketched(model: nn.Module, name: str, group: Group) -> None:
    def pays(layer: str, _: nn.Module) -> bool:
        after_attention = layer.endswith("attention.output.dense")
        return ".encoder." in layer and (group.attention == "eager" or not after_attention)

    kind, _, rate = name.partition(" ")
    share = int(rate.rstrip("%")) / 100 if rate else None
    lowtide.sketch(model, share, kind=kind, layers=pays, always=True)  # under a cap, too, to compare with


@contextmanager
def prepared(stand: Training, group: Group, way: Way, budget: int | None) -> Iterator[Call]:
    """What computes the loss in some way, while the context lasts."""
    model, compiled = stand.model, group.how == "compiled"
    if way.sketch != "none":
        sketched(model, way.sketch, group)
    try:
        if budget is not None:
            executor = "inductor" if compiled else "eager"
            prices = "measured" if stand.device.type == "cuda" else "roofline"
            lowtide.cap(model, budget, executor=executor, prices=prices, optimizer=stand.optimizer)
        if group.how == "graph":
            yield Recorded(stand, model)
        else:
            yield torch.compile(lambda *batch: model(*batch)) if compiled and budget is None else model
    finally:
        if budget is not None:
            lowtide.uncap(model)
        if way.sketch != "none":
            lowtide.unsketch(model)
        torch._dynamo.reset()


def measured(stand: Training, call: Call, seconds: float) -> Row:
    """The peak of a step, and the median of its milliseconds over about n seconds of steps."""
    cuda = stand.device.type == "cuda"
    clock = cuda_times if cuda else cpu_times
    stand.tidy()
    about = min(clock(stand, call, 2)) / 1e3
    steps = min(max(round(seconds / about), 4), 20) if seconds else 1
    if not cuda:
        peak = lowtide.measure(lambda: stand.step(call), device="cpu", resident=stand.held).peak
        return {"peak": peak, **calm(lambda: clock(stand, call, steps))}
    torch.cuda.reset_peak_memory_stats()
    times = calm(lambda: clock(stand, call, steps))
    peak = call.peak if isinstance(call, Recorded) else torch.cuda.max_memory_allocated()
    return {"peak": peak, **times, "timed_steps": steps, **kernels(stand, call)}
