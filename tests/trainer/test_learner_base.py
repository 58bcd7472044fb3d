import pytest

from weft.trainer.learner_base import LearnerModule


@pytest.mark.parametrize("method", ["init", "create_state_partition_specs"])
def test_a_learner_module_says_what_to_define(method):
    module = LearnerModule.default_config().set(name="m").instantiate(parent=None)
    with pytest.raises(NotImplementedError, match=f"LearnerModule must define `{method}`"):
        getattr(module, method)({})
