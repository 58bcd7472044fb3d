import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import TransformArgumentError
from weft.lifting.crossing import Static
from weft.nnx.transforms.carry import with_objects, without_objects


def test_objects_leave_a_body_as_their_places():
    m, v = nnx.Dict(w=nnx.Param(1.0)), nnx.Param(2.0)
    given = {"m": m, "x": (jnp.ones(2), v)}
    boxed = without_objects(given, {"m": m, "x": (jnp.zeros(2), v)})
    assert (boxed["m"], boxed["x"][1]) == (Static(0), Static(1))
    back = with_objects(given, boxed)
    assert back["m"] is m and back["x"][1] is v and back["x"][0].tolist() == [0.0, 0.0]


def test_one_object_may_be_carried_twice():
    m = nnx.Dict()
    boxed = without_objects((m, [m]), (m, [m]))
    back = with_objects((m, [m]), boxed)
    assert back[0] is m and back[1][0] is m


def test_each_object_is_returned_in_its_place():
    a, b = nnx.Dict(), nnx.List()
    with pytest.raises(
        TransformArgumentError, match=r"a loop: the carry\[0\] is returned as another L"
    ):
        without_objects((a, b), (b, a))
    with pytest.raises(
        TransformArgumentError, match="receives 2 objects in its carry and returns 1"
    ):
        without_objects((a, b), (a, 1.0))
    with pytest.raises(TransformArgumentError, match=r"the carry\[1\] is returned as another Dict"):
        without_objects((a,), (a, nnx.Dict()))
