"""Arguments for torch's own operators, made up from their schemas."""

import torch

aten = torch.ops.aten

SHAPE = (3, 5, 37)
WORDS = {"rounding_mode": "floor", "approximate": "tanh", "half_to_float": False, "dim": -1, "n": 1, "p": 1}


def overloads():
    """Every overload of torch's own operators, in an order."""
    names = {name.partition("::")[2].partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    for name in sorted(names):
        packet = getattr(aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            yield getattr(packet, overload)


def tensor_for(name, dtype, target):
    """A tensor in (0, 1), or a mask, an index or a number as its name says."""
    if name in ("mask", "condition"):
        return torch.rand(SHAPE) < 0.5
    if name == "index":
        return torch.randint(0, SHAPE[-1], SHAPE)
    if target is aten.masked_fill.Tensor and name == "value":
        return torch.tensor(0.5, dtype=dtype)
    wide = torch.rand(SHAPE) if dtype.is_floating_point else torch.randint(0, 2, SHAPE)
    return wide.to(dtype)


def argument_for(arg, dtype, target):
    kind = str(arg.type)
    if arg.name in WORDS:
        return WORDS[arg.name]
    if arg.name in ("input_dtype", "dtype"):
        return dtype
    if kind == "Tensor":
        return tensor_for(arg.name, dtype, target)
    if kind.startswith("Optional") or arg.has_default_value():
        return arg.default_value if arg.default_value is not None else 0.25 if "number" in kind else None
    return {"number": 0.5, "int": 1, "bool": False, "float": 0.5}[kind]


def arguments(target, dtype):
    schema = target._schema.arguments
    made = [(arg, argument_for(arg, dtype, target)) for arg in schema]
    if target is aten.scatter.value:
        made = [(arg, 1.5 if arg.name == "value" else value) for arg, value in made]
    plain = [value for arg, value in made if not arg.kwarg_only]
    return plain, {arg.name: value for arg, value in made if arg.kwarg_only}


def same_bits(left, right):
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
