"""What one of two ranks does: each scenario trains a small model with and without a cap, and tells of it.

What the ranks saw goes to a file for each, which `test_two_ranks.py` reads.
"""

import json
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lowtide
from lighter import forget_compiled_code, spare_the_garbage_collector
from lowtide._torch import inner_tensors
from short_search import short_search

WIDTH, CLASSES, BATCH, STEPS = 16, 4, 48, 3


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """A few blocks, of which some are `used`, and a loss; `trouble` is called in the forward."""

    def __init__(self, width=WIDTH, used=3, trouble=None):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(width) for _ in range(3)), nn.Linear(width, CLASSES)
        self.used, self.trouble = used, trouble

    def forward(self, x, y):
        for block in self.blocks[: self.used]:
            x = block(x)
        if self.trouble is not None:
            x = self.trouble(x)
        return nn.functional.cross_entropy(self.head(x), y)


def tensor_parallel(mesh, **arguments):
    torch.manual_seed(0)
    model = Model(**arguments)
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def gathered(parameter):
    """The whole of a sharded parameter; its gradient is averaged over the ranks and scattered."""
    whole = parameter.redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial("avg")])


def property_of(name):
    return property(lambda module: gathered(module._parameters[name]))


def sharded(mesh, **arguments):
    """Every parameter sharded, and gathered where it is read: SimpleFSDP's way."""
    torch.manual_seed(0)
    model = Model(**arguments)
    for module in list(model.modules()):
        names = list(module._parameters)
        for name in names:
            whole = module._parameters[name].data
            module._parameters[name] = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
        if names:
            kind = type(module)
            module.__class__ = type(f"Sharded{kind.__name__}", (kind,), {n: property_of(n) for n in names})
    return model


def local(tensors):
    return [tensor for each in tensors for tensor in inner_tensors(each).values()]


def state_of(optimizer):
    state = [value for each in optimizer.state.values() for value in each.values()]
    return local(value for value in state if isinstance(value, torch.Tensor))


def batch(step, *, rank=0, size=BATCH, width=WIDTH):
    generator = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(size, width, generator=generator)
    return x, torch.randint(0, CLASSES, (size,), generator=generator)


def trained(model, budget=None, *, rank=0, micro_batches=1, width=WIDTH, **options):
    """Some steps of AdamW: losses, parameters and state at the end, and the peak of the last."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if budget is not None:
        lowtide.cap(model, budget, optimizer=optimizer, **{"prices": "roofline", **options})
    losses, peak = [], 0
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(micro_batches):
            x, y = batch(10 * step + part, rank=rank, width=width)

            def call(x=x, y=y):
                loss = model(x, y)
                loss.backward()
                losses.extend(local([loss.detach()]))

            gradients = [parameter.grad for parameter in model.parameters()]
            resident = [*local(model.parameters()), *local(gradients), *state_of(optimizer)]
            if budget is None:
                call()
            else:
                peak = lowtide.measure(call, device="cpu", resident=resident).peak
        optimizer.step()
    return [*losses, *local(model.parameters()), *state_of(optimizer)], peak


def same(left, right):
    return len(left) == len(right) and all(map(torch.equal, left, right))


def compared(make, budget, **arguments):
    """A model trained plainly and under a cap."""
    plain, _ = trained(make(), **{k: v for k, v in arguments.items() if k != "prices"})
    model = make()
    capped, peak = trained(model, budget, **arguments)
    plan = lowtide.plan_of(model)
    runs = [step.op for step in plan.schedule.steps if isinstance(step, lowtide.Run)]
    gathers = [op.name for op in plan.graph.ops if "all_gather" in op.target]
    return {
        "same": same(plain, capped),
        "peak": peak,
        "planned": plan.peak,
        "budget": plan.budget,
        "uncapped": plan.uncapped.peak,
        "optimizer": plan.graph.fixed.get("optimizer"),
        "gathers": len(gathers),
        "gathered again": sum(runs.count(name) - 1 for name in gathers),
        "schedule": plan.schedule.to_dict(),
        "seconds": plan.seconds,
        "prices": plan.graph.prices,
        "notes": plan.notes,
        "dtensors": sum(isinstance(parameter, DTensor) for parameter in model.parameters()),
    }


def refused(call):
    """The error of a call."""
    try:
        call()
    except lowtide.LowtideError as error:
        return {"kind": type(error).__name__, "said": str(error)}
    return {"kind": None, "said": ""}


def call_of(model, *args, budget="80%", **options):
    return lambda: lowtide.cap(model, budget, prices="roofline", **options)(*args)


def raising(x):
    raise RuntimeError("no data on this rank")


class Averaged(nn.Module):
    """Gives its loss as a DTensor."""

    def __init__(self, model, mesh):
        super().__init__()
        self.model, self.mesh = model, mesh

    def forward(self, x, y):
        return DTensor.from_local(self.model(x, y)[None], self.mesh, [Shard(0)]).mean()


class Ranks:
    """The scenarios, each a method that both ranks run at the same time."""

    def __init__(self):
        self.rank = dist.get_rank()
        self.mesh = init_device_mesh("cpu", (2,))

    def tensor_parallel(self):
        return compared(lambda: tensor_parallel(self.mesh), "80%")

    def sharded_parameters(self):
        return compared(lambda: sharded(self.mesh), "55%", rank=self.rank)

    def dtensor_loss(self):
        return compared(lambda: Averaged(tensor_parallel(self.mesh), self.mesh), "80%")

    def measured_prices(self):
        return compared(lambda: sharded(self.mesh), "70%", rank=self.rank, prices="measured")

    def accumulation(self):
        return compared(lambda: sharded(self.mesh), "75%", rank=self.rank, micro_batches=2)

    def uneven_shards(self):
        return compared(lambda: sharded(self.mesh, width=15), "75%", rank=self.rank, width=15)

    def compiled(self):
        model = torch.compile(
            sharded(self.mesh), backend="lowtide", options={"budget": "70%", "prices": "roofline"}
        )
        return {"same": same(trained(sharded(self.mesh))[0], trained(model)[0])}

    def other_budget(self):
        return refused(call_of(tensor_parallel(self.mesh), *batch(0), budget=f"{80 - self.rank}%"))

    def other_shape(self):
        return refused(call_of(tensor_parallel(self.mesh), *batch(0, size=BATCH + self.rank)))

    def other_graph(self):
        model = tensor_parallel(self.mesh, trouble=torch.sin if self.rank else torch.cos)
        return refused(call_of(model, *batch(0)))

    def fewer_collectives(self):
        return refused(call_of(tensor_parallel(self.mesh, used=3 - self.rank), *batch(0)))

    def one_fails(self):
        model = tensor_parallel(self.mesh, trouble=raising if self.rank else None)
        return refused(call_of(model, *batch(0)))

    def too_small(self):
        return refused(call_of(tensor_parallel(self.mesh), *batch(0), budget="10KiB"))

    def one_does_not_come(self):
        store, model = dist.distributed_c10d._get_default_store(), tensor_parallel(self.mesh)
        if self.rank:
            return None
        before = store.timeout
        store.set_timeout(timedelta(seconds=1))
        try:
            return refused(call_of(model, *batch(0)))
        finally:
            store.set_timeout(before)


def run(folder, rank):
    """With the process group of `all_ranks.py`."""
    ranks, seen = Ranks(), {}
    for name in [name for name in vars(Ranks) if not name.startswith("_")]:
        forget_compiled_code()
        spare_the_garbage_collector()
        try:
            with short_search():  # at measured prices: ranks have to agree on some
                seen[name] = getattr(ranks, name)()
        except Exception:
            seen[name] = {"raised": traceback.format_exc()}
        Path(folder, f"{rank}.json").write_text(json.dumps(seen))
        dist.barrier()
