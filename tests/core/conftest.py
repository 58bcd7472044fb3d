"""No test of the core may let a tracer out of its transformation."""

import jax
import pytest


@pytest.fixture(autouse=True)
def leaks_are_errors():
    with jax.checking_leaks():
        yield
