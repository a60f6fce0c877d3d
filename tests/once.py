"""What several tests need and takes long to make: made once, whatever worker its tests are on.

Workers (`pytest -n 2`) take tests from each other, and each has fixtures of its own. Here the first that asks
makes the files; who asks meanwhile waits for them. What was left half-made is made anew.
"""

import fcntl
import os


def once(tmp_path_factory, name, make):
    """The folder that `make` has filled."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = base / f"{name}.done"
        if not done.exists():
            folder = tmp_path_factory.mktemp(name)
            make(folder)
            done.write_text(str(folder))
        return type(base)(done.read_text())
