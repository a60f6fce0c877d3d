"""Loops with DistributedDataParallel, as they are written, for the tests on the CPU and on a GPU."""

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import lowtide

WIDTH = 64
EVENTS = []
"""What happened in a backward: "layer 3" when that layer's runs, "bucket" when an all-reduce starts."""


@torch.library.custom_op("lowtide_tests::mark", mutates_args=())
def mark(x: torch.Tensor, layer: int) -> torch.Tensor:
    return x.clone()


@mark.register_fake
def _(x, layer):
    return torch.empty_like(x)


@torch.library.custom_op("lowtide_tests::mark_backward", mutates_args=())
def mark_backward(gradient: torch.Tensor, layer: int) -> torch.Tensor:
    EVENTS.append(f"layer {layer}")
    return gradient.clone()


@mark_backward.register_fake
def _(gradient, layer):
    return torch.empty_like(gradient)


def _keep_layer(ctx, inputs, output):
    ctx.layer = inputs[1]


mark.register_autograd(
    lambda ctx, gradient: (mark_backward(gradient, ctx.layer), None), setup_context=_keep_layer
)


class Net(nn.Module):
    """Layers whose backward leaves a mark, with dropout, and a loss."""

    def __init__(self, layers=8, *, marks=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.dropout, self.head, self.marks = nn.Dropout(0.1), nn.Linear(WIDTH, 10), marks

    def forward(self, x, target):
        for number, layer in enumerate(self.layers):
            x = x + self.dropout(torch.tanh(layer(x)))
            x = mark(x, number) if self.marks else x
        return functional.cross_entropy(self.head(x), target)


def batches(count, *, rows=256, device="cpu", seed=0):
    torch.manual_seed(seed)
    for _ in range(count):
        yield torch.randn(rows, WIDTH, device=device), torch.randint(10, (rows,), device=device)


def train(model, data, *, accumulate=1, zero=True, budget=None, capped_first=True, optimizer=None, **ddp):
    """The usual loop; gives the weights, the peak of the last step, and what a plan says of it."""
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    if budget is not None and capped_first:
        lowtide.cap(model, budget, optimizer=adam)
    outer = DistributedDataParallel(model, bucket_cap_mb=0.02, **ddp)
    if budget is not None and not capped_first:
        lowtide.cap(outer, budget, optimizer=adam)
    peaks = []
    for number, (x, target) in enumerate(data):
        last = (number + 1) % accumulate == 0

        def step(x=x, target=target, last=last):
            if last:
                outer(x, target).backward()
            else:
                with outer.no_sync():
                    outer(x, target).backward()

        state = [t for each in adam.state.values() for t in each.values()]
        peaks.append(lowtide.measure(step, resident=state).peak)
        if last:
            adam.step()
            adam.zero_grad(set_to_none=zero)
    return [p.detach().clone() for p in model.parameters()], peaks


def note_buckets(outer):
    """Let each all-reduce leave a mark."""

    def hook(state, bucket):
        EVENTS.append("bucket")
        buffer = bucket.buffer().div_(torch.distributed.get_world_size())
        return torch.distributed.all_reduce(buffer, async_op=True).get_future().then(lambda f: f.value()[0])

    outer.register_comm_hook(None, hook)


def events_of_backward(budget, *, device="cpu", steps=2, **ddp):
    """What happened in the backward of the last step, in order."""
    torch.manual_seed(0)
    model = Net(marks=True).to(device)
    if budget is not None:
        lowtide.cap(model, budget)
    outer = DistributedDataParallel(model, bucket_cap_mb=0.02, **ddp)
    note_buckets(outer)
    for x, target in batches(steps, device=device):
        loss = outer(x, target)
        EVENTS.clear()
        loss.backward()
        outer.zero_grad()
    return list(EVENTS)
