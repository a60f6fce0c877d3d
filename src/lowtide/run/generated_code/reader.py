"""Follows the text of a compiled graph on tensors without data, line by line.

Nothing is guessed. A line of another form (the control flow of `cond` and `while_loop`, sizes known only at
run time, a wrapper in C++) raises `UnreadableSourceError`; such a graph has to be measured.
"""

from __future__ import annotations

import ast
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch

from ..._torch import private
from ...capture.fx_nodes import storage_of
from ...errors import LowtideError
from .calls import (
    ARITHMETIC,
    CHORES,
    LIBRARIES,
    METHODS,
    PURE,
    Shape,
    elements,
    empty,
    extent,
    find_operator,
    from_pool,
    on_meta,
)
from .ledger import Handed, Ledger
from .moment import Moment, shapes_of

__all__ = ["Reader", "UnreadableSourceError"]

Names = dict[str, Any]
Node = TypeVar("Node", bound=ast.AST)


class UnreadableSourceError(LowtideError):
    """The text of a compiled graph has a line that says nothing certain about memory."""


class Reader:
    """Follows the text of one compiled graph, line by line."""

    def __init__(self, source: str, ledger: Ledger, device: str | None) -> None:
        tree = _parsed(source)
        self.ledger = ledger
        self.device = device
        # With graph partitions the functions are methods of a class `Runner`, else they are at the top.
        bodies = [tree.body, *(runner.body for runner in _of(ast.ClassDef, tree.body))]
        self.functions = {
            function.name: function for body in bodies for function in _of(ast.FunctionDef, body)
        }
        self.partitions = _partitions(tree)
        self.constants: Names = {"inf": math.inf, "nan": math.nan}

    def read(self, inputs: Sequence[int | Handed] | None) -> Sequence[Any]:
        """Run the graph, and give what it returns."""
        for name in ("call", "get_args"):
            if name not in self.functions:
                raise UnreadableSourceError(f"the text has no Python function {name}")
        examples = self.example_inputs()
        self.admit(examples, [0] * len(examples) if inputs is None else inputs)
        returned: Sequence[Any] = self.run("call", examples)
        return returned

    def run(self, function: str, arguments: list[Any]) -> Any:
        body = self.functions[function]
        names = {body.args.args[-1].arg: arguments}
        # A generator, so that nothing after the return is followed.
        return next(self.returns(body.body, names), ())

    # ---- statements

    def returns(self, body: Sequence[ast.stmt], names: Names) -> Iterator[Any]:
        """Follow statements as far as the first that returns, and give what it returns."""
        for line in body:
            if isinstance(line, ast.With):
                yield from self.returns(line.body, names)
            else:
                yield from self.follow(line, names)

    def follow(self, line: ast.stmt, names: Names) -> tuple[Any, ...]:
        """What a statement returns: one thing, or nothing where it does not return."""
        try:
            if isinstance(line, ast.Return):
                return (() if line.value is None else self.value(line.value, names),)
            self.act(line, names)
            return ()
        except UnreadableSourceError:
            raise
        except Exception as error:
            raise _unreadable(line) from error

    def act(self, line: ast.stmt, names: Names) -> None:
        match line:
            case ast.Assign(targets=[target], value=value):
                self.bind(target, self.value(value, names), names)
            case ast.Delete(targets=targets):
                for name in _of(ast.Name, targets):
                    # The storage goes when its last name does, as in the real run: the ledger watches by weak
                    # references.
                    del names[name.id]
            case ast.Expr(value=ast.Call() as call):
                self.launch(call, names)
            case ast.Import() | ast.ImportFrom() | ast.Pass():
                pass
            case _:
                raise _unreadable(line)

    def bind(self, target: ast.expr, value: Any, names: Names) -> None:
        match target:
            case ast.Name(id=name):
                names[name] = value
            case ast.Tuple(elts=targets):
                for part, item in zip(targets, value, strict=True):
                    self.bind(part, item, names)
            case _:
                raise _unreadable(target)

    def launch(self, call: ast.Call, names: Names) -> None:
        """A call whose result nobody takes: a kernel, an operator that writes in place, or a chore."""
        name = ast.unparse(call.func)
        owner, _, verb = name.rpartition(".")
        if verb == "assert_size_stride":
            self.compare(call, *(self.value(argument, names) for argument in call.args[:3]))
        elif verb == "clear":
            names[owner].clear()
        elif self.function_of(name) is not None:
            self.value(call, names)
        elif verb not in CHORES:
            self.note(verb if owner in names else name, self.written(call, name, names))

    def compare(self, line: ast.AST, tensor: torch.Tensor, size: Shape, stride: Shape) -> None:
        """The text knows each tensor's layout; what was read here has to agree with it."""
        if tuple(tensor.shape) != size or extent(size, stride) > elements(tensor):
            raise _unreadable(line, f"it was read as {tuple(tensor.shape)}, strides {tensor.stride()}")

    def written(self, call: ast.Call, name: str, names: Names) -> tuple[Shape, ...]:
        """The shapes that a library function or operator writes: its `out=`, or else its first argument."""
        outputs = [word.value for word in call.keywords if (word.arg or "").startswith("out")]
        if not outputs and name.startswith(LIBRARIES):
            outputs = call.args[:1]
        return shapes_of([self.value(output, names) for output in outputs])

    def note(self, name: str, outputs: tuple[Shape, ...], read: Sequence[Any] = ()) -> None:
        self.ledger.entries.append(Moment.of(name, self.ledger.live, outputs, read))

    # ---- expressions

    def value(self, node: ast.expr, names: Names) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return names[name] if name in names else self.constants[name]
            case ast.Tuple(elts=items):
                return tuple(self.value(item, names) for item in items)
            case ast.List(elts=items):
                return [self.value(item, names) for item in items]
            case ast.Subscript(value=whole, slice=index):
                return self.value(whole, names)[self.value(index, names)]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.value(operand, names)
            case ast.BinOp(left=left, op=sign, right=right):
                return ARITHMETIC[type(sign)](self.value(left, names), self.value(right, names))
            case ast.Attribute(value=ast.Name(id="torch"), attr=name):
                return getattr(torch, name)
            case ast.Slice(lower=lower, upper=upper, step=None):
                return slice(*(None if end is None else self.value(end, names) for end in (lower, upper)))
            case ast.Call(func=ast.Attribute() as method) if _is_of_tensor(method):
                return self.ask(self.value(method.value, names), node, names)
            case ast.Call():
                return self.call(node, names)
        raise _unreadable(node)

    def call(self, call: ast.Call, names: Names) -> Any:
        """What a call returns. The names are those of the header that every such text begins with."""
        name = ast.unparse(call.func)
        arguments, words = self.arguments(call, names)
        function = self.function_of(name)
        if function is not None:
            return self.run(function, arguments.pop())
        if name in PURE:
            return PURE[name](*arguments, **words)
        if name.startswith("empty_strided"):
            return self.allocate(call, name, *arguments, **words)
        if name.startswith(LIBRARIES):
            return self.operate(call, name, arguments, words)
        if name.rpartition(".")[2] in CHORES:
            return None
        raise _unreadable(call)

    def arguments(self, call: ast.Call, names: Names) -> tuple[list[Any], Names]:
        words = {word.arg: self.value(word.value, names) for word in call.keywords if word.arg}
        return [self.value(argument, names) for argument in call.args], words

    def ask(self, tensor: torch.Tensor, call: ast.Call, names: Names) -> torch.Tensor:
        """What a method of a tensor returns: a view, or the sum of a workspace's parts in some type."""
        assert isinstance(call.func, ast.Attribute)
        arguments, words = self.arguments(call, names)
        result: torch.Tensor = getattr(tensor, call.func.attr)(*arguments, **words)
        # A view has a known storage; only a new one (a sum, a cast) is an allocation.
        if storage_of(result) not in self.ledger.known:
            self.ledger.allocate(result)
            self.note(call.func.attr, shapes_of([result]))
        return result

    def function_of(self, name: str) -> str | None:
        """The function of the text that a name calls: a subgraph, or a partition by its number."""
        if name.startswith("self.partitions["):
            return self.partitions[int(name.removeprefix("self.partitions[").removesuffix("]"))]
        return name if name in self.functions else None

    def allocate(
        self, call: ast.Call, name: str, size: Shape, stride: Shape, dtype: Any = None, **options: Any
    ) -> torch.Tensor:
        place = options.get("device", name.removeprefix("empty_strided_"))
        if place == "p2p":
            raise _unreadable(call, "that memory is not the allocator's")
        buffer = empty(size, stride, dtype=dtype or options["dtype"])
        self.ledger.allocate(buffer, counts=self.counts(place))
        return buffer

    def operate(self, call: ast.Call, name: str, arguments: list[Any], words: Names) -> Any:
        """The results of an operator: the buffers it is told to write, or new ones."""
        told = [
            item for word, item in words.items() if word.startswith("out") and isinstance(item, torch.Tensor)
        ]
        if told:
            result: Any = told[0] if len(told) == 1 else tuple(told)
        else:
            result = self.results(call, name, arguments, words)
        outputs = shapes_of(result if isinstance(result, (tuple, list)) else [result])
        self.note(name, outputs, arguments)
        return result

    def results(self, call: ast.Call, name: str, arguments: list[Any], words: Names) -> Any:
        places = [item.type for item in (*arguments, *words.values()) if isinstance(item, torch.device)]
        try:
            result = find_operator(name)(
                *map(on_meta, arguments), **{word: on_meta(words[word]) for word in words}
            )
        except Exception as error:
            raise _unreadable(call, "the sizes of its results are not known") from error
        for leaf in private("tree_leaves")(result):
            if isinstance(leaf, torch.Tensor):
                self.ledger.allocate(leaf, counts=all(map(self.counts, places)))
        return result

    def counts(self, place: str) -> bool:
        """Whether memory of a place ("cuda", "cuda:0", "cpu_pinned") is on the device in question."""
        return self.device is None or place.startswith(self.device)

    # ---- inputs

    def example_inputs(self) -> list[Any]:
        """Inputs as the text's own benchmark makes them. Constants of the graph are made there as well."""
        names: Names = {}
        for line in self.functions["get_args"].body:
            if isinstance(line, ast.Return) and line.value is not None:
                return list(self.value(line.value, names))
            if isinstance(line, ast.Global):
                self.constants |= dict.fromkeys(line.names)
            elif isinstance(line, ast.Assign):
                self.make_example(line, names)
        return []

    def make_example(self, line: ast.Assign, names: Names) -> None:
        try:
            self.follow(line, names)
        except UnreadableSourceError:
            self.bind(line.targets[0], None, names)  # no tensor: a random generator, an object of the user's
        for name in self.constants.keys() & names.keys():
            self.constants[name] = names.pop(name)

    def admit(self, examples: list[Any], inputs: Sequence[int | Handed]) -> None:
        """Put inputs that share a storage into one, and tell the ledger of each storage's bytes."""
        if len(inputs) != len(examples):
            raise ValueError(f"the graph takes {len(examples)} inputs, and {len(inputs)} were described")
        sharing: dict[Any, list[int]] = defaultdict(list)
        for place, handed in enumerate(inputs):
            sharing[handed.storage if isinstance(handed, Handed) else (place,)].append(place)
        for places in sharing.values():
            _share(examples, places)
        sizes: dict[int, int] = defaultdict(int)
        for tensor, handed in zip(examples, inputs, strict=True):
            if isinstance(tensor, torch.Tensor):
                size = handed.bytes if isinstance(handed, Handed) else handed
                sizes[storage_of(tensor)] = max(size, sizes[storage_of(tensor)])
        for place, tensor in enumerate(examples):
            # Storages of inputs are numbered by their places, so that an output that is an input can be told.
            self.ledger.count = place
            if isinstance(tensor, torch.Tensor) and storage_of(tensor) not in self.ledger.known:
                self.ledger.enter(tensor, sizes[storage_of(tensor)])
        self.ledger.count = len(examples)
        for constant in self.constants.values():
            if isinstance(constant, torch.Tensor):
                self.ledger.enter(constant, 0)


def _share(tensors: list[Any], places: list[int]) -> None:
    """Lay the tensors at some places into one storage, the largest of theirs."""
    if len(places) > 1:
        size = max(tensors[place].untyped_storage().nbytes() for place in places)
        home = empty((size,), (1,), dtype=torch.uint8)
        for place in places:
            tensor = tensors[place]
            tensors[place] = from_pool(home, 0, tensor.dtype, tensor.shape, tensor.stride())


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError as error:
        raise UnreadableSourceError("the text is not Python") from error


def _of(kind: type[Node], nodes: Sequence[ast.AST]) -> list[Node]:
    return [node for node in nodes if isinstance(node, kind)]


def _partitions(tree: ast.Module) -> list[str]:
    """The functions of `runner = Runner(partitions=[partition_0, ...])`."""
    for line in _of(ast.Assign, tree.body):
        match line.value:
            case ast.Call(func=ast.Name(id="Runner"), keywords=[ast.keyword(value=ast.List(elts=names))]):
                return [name.id for name in _of(ast.Name, names)]
    return []


def _is_of_tensor(method: ast.Attribute) -> bool:
    """Whether a method is one of a tensor's: `torch.as_strided` is a function."""
    owner = method.value
    return method.attr in METHODS and not (isinstance(owner, ast.Name) and owner.id == "torch")


def _unreadable(node: ast.AST, why: str = "no form that is known here") -> UnreadableSourceError:
    text = ast.unparse(node).splitlines()[0]
    return UnreadableSourceError(
        f"line {getattr(node, 'lineno', '?')} of the compiled graph, `{text}`: {why}"
    )
