"""Prints the table of faults after the tests."""

import whole_runs


def pytest_terminal_summary(terminalreporter):
    """Says of each fault how often it was tried, survived and lost."""
    if whole_runs.SURVIVED:
        terminalreporter.section("faults")
        terminalreporter.line(f"{'fault':58}  tried  survived  lost")
        for fault, (tried, survived) in whole_runs.SURVIVED.items():
            terminalreporter.line(f"{fault:58}  {tried:5}  {survived:8}  {tried - survived:4}")
