"""Counts faults that were tried and survived, and prints the table after the tests."""

import contextlib

import pytest

COUNTS: dict[str, list[int]] = {}  # by fault: tried, survived


@pytest.fixture
def trying(record_property):
    """Counts a fault as tried, and as survived where the block `with trying(fault):` ends without an error."""

    @contextlib.contextmanager
    def trying(fault):
        survived = False
        try:
            yield
            survived = True
        finally:
            record_property("fault", [fault, survived])

    return trying


def pytest_runtest_logreport(report):
    """Adds what a test has tried, also one that ran in another process."""
    if report.when == "call":
        for fault, survived in (value for name, value in report.user_properties if name == "fault"):
            count = COUNTS.setdefault(fault, [0, 0])
            count[0] += 1
            count[1] += survived


def pytest_terminal_summary(terminalreporter):
    """Says of each fault how often it was tried, survived and lost."""
    if COUNTS:
        terminalreporter.section("faults")
        terminalreporter.line(f"{'fault':64}  tried  survived  lost")
        for fault, (tried, survived) in COUNTS.items():
            terminalreporter.line(f"{fault:64}  {tried:5}  {survived:8}  {tried - survived:4}")
