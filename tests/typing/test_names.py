"""The names that type checkers know are those that functions and layers take."""

import runpy
import typing

import pytest

import weft.typing
from weft.functional.activation import ACTIVATIONS
from weft.functional.initializers import Distribution
from weft.hierarchy import base_layer
from weft.hierarchy.attention import feed_forward
from weft.trainer import fit, precision, supervised


@pytest.fixture
def names_of(monkeypatch):
    monkeypatch.setattr(typing, "TYPE_CHECKING", True)
    types = runpy.run_path(str(weft.typing.__file__))
    return lambda alias: typing.get_args(types[alias])


def test_names_are_those_of_the_tables(names_of):
    assert names_of("ActivationName") == tuple(ACTIVATIONS)
    assert names_of("FeedForwardStructure") == tuple(feed_forward._NORMS)
    assert names_of("LossName") == tuple(supervised.LOSSES)
    assert set(names_of("MetricName")) == {"accuracy", *supervised.CLASS_METRICS}
    assert names_of("OptimizerName") == tuple(fit.OPTIMIZERS)
    assert names_of("PrecisionName") == tuple(precision._POLICIES)
    assert names_of("QuantizationName") == tuple(base_layer._PRODUCTS)
    assert names_of("DistributionName") == typing.get_args(Distribution)
