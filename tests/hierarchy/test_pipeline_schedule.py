import jax
import numpy as np
import pytest

from weft.core.axis_rules import logical_axis_rules
from weft.errors import MeshError
from weft.hierarchy.pipeline_schedule import BaseSchedule, GPipeSchedule, shard_stages


def made(cls):
    return cls.default_config().set(num_stages=3, num_microbatches=4).instantiate()


def test_as_many_steps_as_microbatches_and_stages_behind_the_first():
    schedule = made(GPipeSchedule)
    assert (schedule.num_stages, schedule.num_microbatches, schedule.num_iterations) == (3, 4, 6)


def test_a_base_class_has_no_order():
    with pytest.raises(NotImplementedError):
        made(BaseSchedule).scan(lambda work, x: (work, x), carry=None, state=None, xs=None)


def test_a_rule_for_an_axis_that_the_mesh_lacks_is_said():
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(shard_stages(np.ones((3, 2))), np.ones((3, 2)))
        with (
            logical_axis_rules([("pipeline", "stage")]),
            pytest.raises(MeshError, match="is to be split over 'stage', and the mesh has the axe"),
        ):
            shard_stages(np.ones((3, 2)))
