"""Python and torch with less to do beside what a test looks at; for processes that tests start, too."""

import gc
import sys
from functools import cache

import torch


def spare_the_garbage_collector():
    """What imports and torch's caches keep stays to the end: no pass need look at it again.

    Lowtide asks for a pass before a step is planned: it has to look at what the test has made, no more.
    Captures make many objects and few cycles: looking for them by itself took a tenth of the whole time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def forget_compiled_code():
    """Where `torch._dynamo` was not imported, nothing was compiled; importing it takes seconds."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
        # Dynamo times each new guard, for its log, after a flush of the caches that takes 0.03 s.
        torch._dynamo.guards.profile_guard_manager = lambda *args: 0.0
        _spare_generators()
        _spare_the_compiler()


@cache
def _spare_generators():
    """A fiftieth of a capture goes into twelve tensors that only `functionalize_rng_ops` reads."""
    from torch._decomp.decompositions_for_rng import PhiloxStateTracker

    PhiloxStateTracker.reset = staticmethod(lambda: None)


@cache
def _spare_the_compiler():
    """Inductor's C++ takes one number at a time and is hardly optimised: that halves the time of a kernel.

    Which loops are fused and which buffers are written is decided before, and stays.
    """
    from torch._inductor import config, cpp_builder

    config.cpp.simdlen = 0
    config.cpp.vec_isa_ok = True  # or else a program is compiled for each kind of vectors, and started
    flags = cpp_builder._get_optimization_cflags
    cpp_builder._get_optimization_cflags = lambda compiler, min_optimize=False: flags(compiler, True)
