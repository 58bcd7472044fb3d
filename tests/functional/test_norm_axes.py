import pytest

from weft.errors import ArgumentValueError
from weft.functional.norm_axes import group_norm_axes, instance_norm_axes


def test_axes_of_groups():
    assert group_norm_axes(None, (2, 3, 4, 5)) == (1, 2, 3)
    assert group_norm_axes(-1, (2, 3, 4)) == (2,)
    with pytest.raises(ArgumentValueError, match=r"reduction_axes=\(1,\) .*\(2, 3, 4\).* add -1"):
        group_norm_axes((1,), (2, 3, 4))


def test_axes_of_instances():
    assert instance_norm_axes((-1, 1), (2, 3, 4, 5)) == ((1, 3), (2,))
    with pytest.raises(
        ArgumentValueError, match=r"feature_axes=\(1, -3\) .*include the first axis"
    ):
        instance_norm_axes((1, -3), (2, 3, 4))
