"""`pytest --cpu`: the files and tests that take the most CPU time, with the processes that they start.

On a busy machine the seconds of the clock (`--durations`) say more of its load than of the tests. What a
module's fixture does counts for the first test that asks for it. The report of a test's end has its seconds,
so that they come from workers (`-n 2`) and into `--junit-xml` files, too.
"""

from collections import Counter
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage

import pytest

SHOWN = 40
FIELD = "cpu_seconds"


def spent():
    used = [getrusage(who) for who in (RUSAGE_SELF, RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


class CpuSeconds:
    """Notes what each test has spent, and lists the tests that spent the most."""

    def __init__(self):
        self.last = spent()
        self.of_test = Counter()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self):
        self.last = spent()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call):
        report = yield
        if call.when == "teardown":  # the one report whose properties come into files
            report.user_properties.append((FIELD, round(spent() - self.last, 3)))
        return report

    def pytest_runtest_logreport(self, report):
        self.of_test[report.nodeid] += dict(report.user_properties).get(FIELD, 0)

    def pytest_terminal_summary(self, terminalreporter):
        of_file = Counter()
        for name, seconds in self.of_test.items():
            of_file[name.partition("::")[0]] += seconds
        terminalreporter.section(f"CPU seconds: {sum(of_file.values()):.0f} in all")
        for most in (of_file, self.of_test):
            for name, seconds in most.most_common(SHOWN):
                terminalreporter.write_line(f"{seconds:8.2f}  {name}")
