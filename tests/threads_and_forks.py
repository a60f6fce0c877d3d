"""Capped calls from threads and in a forked process; a process of its own, with no other test's threads."""

import os
import signal
import threading
import time
from pathlib import Path

import torch

import lowtide
from short_search import short_search, steady_prices
from small_models import WithLoss, mlp

torch.set_num_threads(1)


def from_threads(model, x):
    plans = []

    def step():
        model(x)
        plans.append(lowtide.plan_of(model))

    threads = [threading.Thread(target=step) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
        until_gone(thread)
    assert len(plans) == 3
    assert all(plan.extra > 0 for plan in plans)


def until_gone(thread):
    """A joined thread may still give back what MKL keeps for it, under a lock that a child finds taken."""
    while Path(f"/proc/self/task/{thread.native_id}").exists():
        time.sleep(0.001)


def in_a_fork(model):
    child = os.fork()
    if child == 0:
        signal.alarm(600)  # a deadlock ends the child, and is seen
        model(torch.randn(300, 32)).backward()
        os._exit(0 if lowtide.plan_of(model).extra > 0 else 1)
    assert os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    torch.manual_seed(0)
    capped = lowtide.cap(WithLoss(mlp()), "60%")
    with short_search(), steady_prices():
        from_threads(capped, torch.randn(256, 32))
        in_a_fork(capped)
