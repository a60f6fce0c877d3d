"""Plain data to JSON and back, with errors that name the field.

Reading never executes anything: the text is parsed by `json` and each field is checked before it is used. All
text goes through `plain`, so that no name reaches a terminal or a page as something that it obeys.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from ..errors import FormatError
from ..files.plain_text import plain

T = TypeVar("T")

MOST_BITS = 63

MOST_FILE_BYTES, MOST_OPS = 1 << 28, 200_000
"""Of a file that is read, by default. Chosen: four times the ops of the largest step in
benchmarks/plan_times.py; that many are read in some seconds."""

_CHECKS: dict[str, tuple[tuple[type, ...], str]] = {
    "str": ((str,), "text"),
    "int": ((int,), "a whole number"),
    "bool": ((bool,), "true or false"),
    "float": ((int, float), "a number"),
    "tuple[str, ...]": ((list, tuple), "a list of names"),
}


def compact(record: Any) -> dict[str, Any]:
    """A flat dataclass as a dict, without the fields that have their default."""
    fields = dataclasses.fields(record)
    pairs = ((field, getattr(record, field.name)) for field in fields)
    return {field.name: value for field, value in pairs if value != field.default}


def dump(data: dict[str, Any]) -> str:
    """JSON text, one record of each list per line: it can be read and compared by people."""
    lines = []
    for key, value in data.items():
        if isinstance(value, list) and value:
            items = ",\n    ".join(json.dumps(item) for item in value)
            lines.append(f"  {json.dumps(key)}: [\n    {items}\n  ]")
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def decode(data: bytes, noun: str) -> str:
    """The text of a file, with or without a mark at its start."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise FormatError(f"not a {noun} file: it is not UTF-8 text") from None


def read_bytes(path: Path | str, noun: str, most_bytes: int) -> bytes:
    """What is in a file, or with "-" in standard input, unless that is more than it may be."""
    stream = sys.stdin.buffer if path == "-" else open(path, "rb")  # noqa: SIM115
    try:
        data = stream.read(most_bytes + 1)
    finally:
        if path != "-":
            stream.close()
    if len(data) > most_bytes:
        raise FormatError(
            f"not read: a {noun} file may have most_bytes={most_bytes}, and it has more; take more "
            "(--most-bytes on the command line) if you know where it comes from"
        )
    return data


def check_ops(data: Any, most_ops: int) -> None:
    """Refuse a graph of more ops than may be read, before any of them is looked at."""
    count = len(data["ops"]) if isinstance(data, dict) and isinstance(data.get("ops"), list) else 0
    if count > most_ops:
        raise FormatError(
            f'field "ops": a graph may have most_ops={most_ops}, and it has {count}; take more '
            "(--most-ops on the command line), and time to plan it"
        )


def parse(text: str, noun: str) -> Any:
    """The data of a JSON text."""
    try:
        return json.loads(text, object_pairs_hook=_once_each)
    except json.JSONDecodeError as error:
        raise FormatError(
            f"not a {noun} file: {error.msg} at line {error.lineno}, column {error.colno} "
            "(is the file cut short?)"
        ) from None
    except (RecursionError, ValueError) as error:
        raise FormatError(f"not a {noun} file: {error}") from None
    except TypeError:
        raise FormatError(f"a {noun} is read from a JSON text, not from a {type(text).__name__}") from None


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; of a name that is there twice readers would take one or the other."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {say(twice)} is used twice in an object")
    return found


def check_header(data: Any, noun: str, version: int, fields: tuple[str, ...]) -> None:
    """Refuse what is not a file of this noun, is of another version, or has a field that nothing reads."""
    if not isinstance(data, dict):
        raise FormatError(f"not a {noun} file: expected an object, found {type(data).__name__}")
    if data.get("lowtide") != noun:
        raise FormatError(f'field "lowtide": expected {noun!r}, found {say(data.get("lowtide"))}')
    found = data.get("version")
    if not isinstance(found, int) or isinstance(found, bool):
        raise FormatError(f'field "version": expected a whole number, found {_cut(_repr(found))}')
    if found != version:
        raise FormatError(
            f'field "version": this Lowtide reads version {version} of a {noun} file, found {say(found)}'
        )
    known = ("lowtide", "version", *fields)
    for name in data:
        if name not in known:
            raise FormatError(f'field "{_cut(name)}": unknown; known are {", ".join(known)}')


def read_list(record: type[T], data: dict[str, Any], name: str, *, needed: tuple[str, ...]) -> Iterator[T]:
    """The records of a list field."""
    for index, item in enumerate(read_items(data, name)):
        yield read_record(record, item, f"{name}[{index}]", needed=needed)


def read_items(data: dict[str, Any], name: str) -> list[Any]:
    """A list field as it is."""
    items = data.get(name)
    if not isinstance(items, list):
        raise FormatError(f'field "{name}": expected a list, found {say(items)}')
    return items


def read_record(record: type[T], item: Any, where: str, *, needed: tuple[str, ...]) -> T:
    """One flat dataclass from a dict, every field checked against its annotation."""
    if not isinstance(item, dict):
        raise FormatError(f"{where}: expected an object, found {say(item)}")
    fields = _fields(record)  # type: ignore[arg-type]  # a class is hashable
    for name in item:
        if name not in fields:
            raise FormatError(f"{where}.{_cut(name)}: unknown field; known are {', '.join(fields)}")
    for name in needed:
        if name not in item:
            raise FormatError(f"{where}.{name}: missing")
    return record(**{name: _read_field(item[name], fields[name], f"{where}.{name}") for name in item})


@cache
def _fields(record: type) -> dict[str, str]:
    """The fields of a dataclass with their annotations; a graph asks once for each of its ops."""
    return {field.name: str(field.type) for field in dataclasses.fields(record)}


def _read_field(value: Any, annotation: str, where: str) -> Any:
    types, noun = _CHECKS.get(annotation, ((str,), "text"))
    fits: bool = isinstance(value, types)
    if not fits or isinstance(value, bool) != (annotation == "bool"):
        raise FormatError(f"{where}: expected {noun}, found {say(value)}")
    if annotation == "tuple[str, ...]":
        for index, name in enumerate(value):
            if not isinstance(name, str):
                raise FormatError(f"{where}[{index}]: expected a name, found {say(name)}")
        return tuple(map(plain, value))
    if isinstance(value, str):
        return plain(value)
    return _finite(value, where) if annotation == "float" else value


def _finite(value: float, where: str) -> float:
    """A number as a float; JSON text can hold ones that no float can."""
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise FormatError(f"{where}: expected a finite number, found {say(value)}")
    return number


def read_text(data: dict[str, Any], name: str, default: str) -> str:
    """A text field."""
    value = data.get(name, default)
    if not isinstance(value, str):
        raise FormatError(f'field "{name}": expected text, found {say(value)}')
    return plain(value)


def read_texts(data: dict[str, Any], name: str) -> tuple[str, ...]:
    """A list of texts."""
    items = read_items(data, name)
    for index, item in enumerate(items):
        if not isinstance(item, str):
            raise FormatError(f"{name}[{index}]: expected text, found {say(item)}")
    return tuple(map(plain, items))


def read_count(data: dict[str, Any], name: str, default: int | None = None) -> int:
    """A whole number >= 0, of 63 bits at most: what is larger is no number of bytes, and fits no float."""
    value = data.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise FormatError(f'field "{_cut(name)}": expected a whole number >= 0, found {say(value)}')
    if value.bit_length() > MOST_BITS:
        raise FormatError(f'field "{_cut(name)}": {say(value)} is 2^{MOST_BITS} or more, which no device has')
    return value


def read_flag(data: dict[str, Any], name: str, default: bool) -> bool:
    """True or false."""
    value = data.get(name, default)
    if not isinstance(value, bool):
        raise FormatError(f'field "{name}": expected true or false, found {say(value)}')
    return value


def read_number(data: dict[str, Any], name: str) -> float:
    """A number."""
    value = data.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise FormatError(f'field "{name}": expected a number, found {say(value)}')
    return _finite(value, f'field "{name}"')


def read_sizes(data: dict[str, Any], name: str) -> dict[str, int]:
    """A mapping from names to bytes."""
    value = data.get(name, {})
    if not isinstance(value, dict):
        raise FormatError(f'field "{name}": expected an object of byte counts, found {say(value)}')
    return {plain(key): read_count(value, key) for key in value}


def say(value: Any) -> str:
    """A value as it is in a file, cut to a bounded length."""
    return "nothing" if value is None else _cut(_repr(value))


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # more digits, or levels, than Python writes
        return f"a very large {type(value).__name__}"


def _cut(text: str) -> str:
    text = plain(text)
    return text if len(text) <= 40 else text[:37] + "..."
