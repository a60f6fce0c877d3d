"""What works here: versions, devices, what each part needs, and where the caches are.

What Lowtide cannot do without is `broken` where it fails: a torch that is too old or lacks a private name, a
small capped step that does not hold. Everything else is an extra that is `missing` where it is not there,
with what it would be good for.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..files.cache_folder import NoCache, cache_folder, private_folder
from ..plans import json_format
from ..units import format_bytes

__all__ = ["Check", "Folder", "Health", "examine"]

OLDEST_TORCH = (2, 11)


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: `state` is "ok", "missing" (an extra) or "broken" (needed)."""

    name: str
    state: str
    found: str


@dataclass(frozen=True)
class Folder:
    """A cache: what is in it, and how many bytes of files."""

    path: str
    bytes: int
    holds: str


@dataclass(frozen=True)
class Health:
    """What `examine` found; prints as a table."""

    checks: tuple[Check, ...]
    caches: tuple[Folder, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing that is needed is broken."""
        return all(check.state != "broken" for check in self.checks)

    def to_json(self) -> str:
        """The findings as JSON text."""
        data: dict[str, Any] = {
            "lowtide": "doctor",
            "version": 1,
            "ok": self.ok,
            "checks": [asdict(check) for check in self.checks],
            "caches": [asdict(folder) for folder in self.caches],
        }
        return json_format.dump(data)

    def __str__(self) -> str:
        lines = [f"{check.state:8} {check.name:18} {check.found}" for check in self.checks]
        lines += [
            f"cache    {format_bytes(folder.bytes):18} {folder.path} ({folder.holds})"
            for folder in self.caches
        ]
        broken = [check.name for check in self.checks if check.state == "broken"]
        lines.append(f"does not work here: {', '.join(broken)}" if broken else "all that is needed is here")
        return "\n".join(lines)


def examine() -> Health:
    """Look at everything."""
    checks = [
        Check("lowtide", "ok", f"{__version__} in {Path(__file__).parents[1]}"),
        Check("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        _torch(),
    ]
    if checks[-1].state == "ok":
        checks += [_private_names(), *_devices(), _capped_step(), _triton()]
    checks += [_cpp_compiler(), _native_search(), *map(_package, PACKAGES)]
    return Health(tuple(checks), tuple(_caches()))


def _torch() -> Check:
    try:
        import torch
    except ImportError as error:
        return Check("torch", "broken", f"cannot be imported: {error}")
    version = str(torch.__version__)
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_TORCH:
        return Check("torch", "broken", f"{version} is too old: Lowtide needs 2.11 or later")
    return Check("torch", "ok", version)


def _private_names() -> Check:
    from .._torch import NAMES, missing_names

    missing = [NAMES[name][0] for name in missing_names()]
    if missing:
        return Check("torch's internals", "broken", f"this torch has no {', '.join(missing)}")
    return Check("torch's internals", "ok", f"{len(NAMES)} of {len(NAMES)} names that Lowtide leans on")


def _devices() -> Iterator[Check]:
    import torch

    from ..devices.table import describe, total_memory

    cpu = torch.device("cpu")
    yield Check(
        "cpu", "ok", f"{format_bytes(total_memory(cpu))}, {torch.get_num_threads()} of {os.cpu_count()} cores"
    )
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        yield Check(f"cuda:{index}", "ok", f"{describe(device)}, {format_bytes(total_memory(device))}")
    if not torch.cuda.device_count():
        built = "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no device"
        yield Check("cuda", "missing", f'{built}; plan for one that is not here with device="H200"')


def _capped_step() -> Check:
    """The proof of it all: a small step on each kind of device, capped and compared."""
    import torch

    from ..evidence.verification import verify

    kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    try:
        for kind in kinds:
            layers = [layer for _ in range(3) for layer in (torch.nn.Linear(64, 64), torch.nn.Dropout(0.1))]
            model = torch.nn.Sequential(*layers).to(kind)
            if not (found := verify(model, torch.ones(256, 64, device=kind), budget="min")):
                return Check("a capped step", "broken", f"on {kind}: " + " ".join(str(found).split()))
    except Exception as error:  # whatever it is, it is what the user wants to know
        return Check("a capped step", "broken", f"{type(error).__name__}: {' '.join(str(error).split())}")
    return Check("a capped step", "ok", f"peak and gradients as promised on {' and '.join(kinds)}")


def _triton() -> Check:
    import torch

    use = 'executor="inductor" on CUDA'
    if _version("triton"):
        return Check("triton", "ok", f"{_version('triton')}, for {use}")
    return Check("triton", "missing", f"needed for {use}" if torch.cuda.is_available() else f"only for {use}")


def _cpp_compiler() -> Check:
    found = _first(shutil.which, os.environ.get("CXX", "g++"), "g++", "clang++")
    use = 'executor="inductor" on the CPU'
    return Check("C++ compiler", "ok", f"{found}, for {use}") if found else _lacks("C++ compiler", use, "g++")


def _native_search() -> Check:
    from ..solve.search.native import library

    if os.environ.get("LOWTIDE_NATIVE", "1") == "0":
        return Check("native search", "missing", "switched off by LOWTIDE_NATIVE=0: plans are searched less")
    if library() is not None:
        return Check("native search", "ok", "compiled, in the cache")
    try:
        private_folder()
    except NoCache as error:
        return Check("native search", "missing", f"there is no cache folder ({error}): searched less")
    if _first(shutil.which, os.environ.get("CC", "cc"), "gcc", "clang"):
        return Check("native search", "missing", "the C compiler fails: searched less")
    return _lacks("native search", "more search in the same time", "a C compiler, as gcc")


PACKAGES = {
    "highspy": ('method="exact", optima of small graphs, closer bounds', 'pip install "lowtide[exact]"'),
    "rich": ("nicer progress in a terminal", 'pip install "lowtide[rich]"'),
}


def _package(name: str) -> Check:
    use, install = PACKAGES[name]
    version = _version(name)
    return Check(name, "ok", f"{version}, for {use}") if version else _lacks(name, use, install)


def _lacks(name: str, use: str, install: str) -> Check:
    return Check(name, "missing", f"would give {use}: {install}")


def _version(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _first(find: Callable[[str], str | None], *names: str) -> str | None:
    return next(filter(None, map(find, names)), None)


def _caches() -> Iterator[Folder]:
    with suppress(NoCache):
        yield _folder(cache_folder(), "measured prices of ops, the compiled search, what it found")
    try:
        from .._torch import private

        place = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or private("inductor_cache")()
    except ImportError:
        return
    yield _folder(Path(place), "torch's compiled kernels")


def _folder(path: Path, holds: str) -> Folder:
    size = 0
    for place, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):  # others may tidy up at the same time
                size += os.lstat(os.path.join(place, name)).st_size
    return Folder(str(path), size, holds)
