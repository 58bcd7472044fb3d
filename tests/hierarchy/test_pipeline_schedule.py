import pytest

from weft.hierarchy.pipeline_schedule import BaseSchedule, GPipeSchedule


def made(cls):
    return cls.default_config().set(num_stages=3, num_microbatches=4).instantiate()


def test_as_many_steps_as_microbatches_and_stages_behind_the_first():
    schedule = made(GPipeSchedule)
    assert (schedule.num_stages, schedule.num_microbatches, schedule.num_iterations) == (3, 4, 6)


def test_a_base_class_has_no_order():
    with pytest.raises(NotImplementedError):
        made(BaseSchedule).scan(lambda work, x: (work, x), carry=None, state=None, xs=None)
