"""Counts faults that were tried and survived; tests/conftest.py prints the table."""

import contextlib

import pytest


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
