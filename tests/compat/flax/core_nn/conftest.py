"""No test of layers on scopes may let a tracer out of its transformation."""

from tests.core.conftest import leaks_are_errors  # noqa: F401
