"""What is changed for the whole process is put back: after interrupts, by threads, in forked children."""

import gc
import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from lowtide import process_wide
from lowtide.process_wide import Shared, attributes, lock, nothing_left
from lowtide.torch_state.garbage import uncollected

LINES = Path(process_wide.__file__).read_text().splitlines()


def interrupted(call, at):
    """Call with an interrupt at one of the lines, calls and returns in the file of changes; whether it came.

    Not where a `with` ends, on the line where it began: Python looks for no interrupts there.
    """
    seen = 0

    def trace(frame, event, _):
        nonlocal seen
        if frame.f_code.co_filename == process_wide.__file__:
            seen += not LINES[frame.f_lineno - 1].lstrip().startswith("with ")
            if seen == at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_an_interrupt_at_any_line_leaves_all_as_it_was():
    owner = SimpleNamespace(first=1, second=2)

    def block():
        first, last = attributes(owner, first=3, second=4), attributes(owner, first=5)
        try:
            with nothing_left(), first, uncollected(), last:
                assert (owner.first, owner.second, gc.isenabled()) == (5, 4, False)
        finally:
            assert (owner.first, owner.second, gc.isenabled()) == (1, 2, True)

    at = 1
    while interrupted(block, at):
        at += 1
    assert at > 60  # all were made and put back


def test_of_several_threads_the_last_puts_back():
    owner = SimpleNamespace(name="own")

    def make(undone_by):
        undone_by(lambda: setattr(owner, "name", "own"))
        owner.name = "other"

    shared = Shared(make)
    inside, may_go = threading.Event(), threading.Event()

    def hold():
        with shared():
            inside.set()
            may_go.wait()

    thread = threading.Thread(target=hold)
    with shared():
        thread.start()
        inside.wait()
    assert owner.name == "other"
    may_go.set()
    thread.join()
    assert owner.name == "own"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_in_a_child_what_other_threads_have_changed_is_put_back_and_their_locks_are_free():
    owner, held = SimpleNamespace(name="own", mine="own"), lock()
    inside, may_go = threading.Event(), threading.Event()

    def change():
        with held, attributes(owner, name="other"), uncollected():
            inside.set()
            may_go.wait()

    thread = threading.Thread(target=change)
    thread.start()
    inside.wait()
    with attributes(owner, mine="other"):
        child = os.fork()
        if child == 0:
            signal.alarm(600)
            as_it_was = owner.name == "own" and owner.mine == "other" and gc.isenabled()
            os._exit(0 if held.acquire() and as_it_was else 1)
    may_go.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert owner.name == "own"
