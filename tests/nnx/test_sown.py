import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import GraphStructureError
from weft.nnx.sown import Captured


def append(xs, x):
    return (*xs, x)


def test_only_wanted_kinds_are_left():
    captured = Captured((nnx.Intermediate,), None, {"h": nnx.Intermediate((1,))})
    assert captured.sow(nnx.Intermediate, "h", 2, append, tuple)
    assert not captured.sow(nnx.Cache, "c", 2, append, tuple)
    ((name, variable),) = captured.values()
    assert name == "h" and type(variable) is nnx.Intermediate and variable.get_value() == (1, 2)


def test_perturbations_that_are_there_or_wanted():
    captured = Captured((nnx.Perturbation,), None, {"p": nnx.Perturbation(3.0)})
    assert captured.perturbation(nnx.Perturbation, "p", 1.0) == 3
    assert captured.perturbation(nnx.Perturbation, "q", jnp.ones(2)).tolist() == [0, 0]
    assert captured.perturbation(nnx.Cache, "r", 1.0) is None


def test_a_name_is_of_one_kind():
    captured = Captured((nnx.Intermediate, nnx.Cache), None, {})
    captured.sow(nnx.Cache, "h", 1, append, tuple)
    with pytest.raises(GraphStructureError, match="'h' was sown as a Cache, and now as a Intermed"):
        captured.sow(nnx.Intermediate, "h", 1, append, tuple)
