import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from weft.config import config_for_function
from weft.errors import InplaceUpdateError, TransformationTypeError
from weft.hierarchy.base_layer import ParameterSpec
from weft.hierarchy.layers import GradientMonitor
from weft.hierarchy.module import functional
from weft.hierarchy.parameter_spec import FactorizationSpec
from weft.hierarchy.rnn import IdentityCell, RepeatedRNNLayer
from weft.struct import VDict
from weft.trainer import optimizers
from weft.trainer.learner import Learner
from weft.trainer.optimizers.base import OptParam
from weft.trainer.update_transformation import (
    ConditionalUpdateTransformation,
    ForwardOutputs,
    GradientMonitorTransformation,
    LearnerModule,
    OverrideInplaceUpdateTransformation,
    Updates,
    UpdateTransformation,
    WrappedPartitionedGradientTransformation,
    as_update_transformation,
    mask_tree,
)


@pytest.mark.parametrize("method", ["init", "create_state_partition_specs"])
def test_learner_module_is_abstract(method):
    module = LearnerModule.default_config().set(name="m").instantiate(parent=None)
    with pytest.raises(NotImplementedError, match=f"LearnerModule must define `{method}`"):
        getattr(module, method)({})


TRACE = config_for_function(optax.trace).set(decay=0.5)
PARAMS = {
    "a": {"w": OptParam(jnp.array([1.0, 2.0]), FactorizationSpec(("row",)), 0.5)},
    "b": OptParam(jnp.array(3.0)),
}
GRADS = {"a": {"w": jnp.array([0.5, -1.0])}, "b": jnp.array(4.0)}
SPECS = {"a": {"w": ParameterSpec((2,), jnp.float32)}, "b": ParameterSpec((), jnp.float32)}
MASKED = optax.MaskedNode()


def make_updates(**kwargs):
    return Updates(**{"opt_params": PARAMS, "delta_updates": GRADS, **kwargs})


def make(cfg):
    return cfg.set(name="tx").instantiate(parent=None)


def transform(tx, updates, state):
    updates, collection = functional(
        tx, prng_key=None, state=state, inputs=(updates,), method="__call__", is_training=True
    )
    return updates, collection.state_updates, collection.summaries


class TestMasks:
    KEEP = {"a": {"w": False}, "b": True}

    def test_stacked_and_plain_dicts_match(self):
        masked = mask_tree({"a": {"w": 1}}, keep={"a": VDict(w=False)}, mask_value=0)
        assert masked == {"a": {"w": 0}}

    def test_updates_are_masked_field_by_field(self):
        updates = make_updates(inplace_updates={"a": {"w": jnp.zeros(2)}})
        masked = updates.mask(self.KEEP, fields=("delta_updates",))
        assert masked.delta_updates == {"a": {"w": MASKED}, "b": 4.0}
        assert masked.opt_params is updates.opt_params
        by_function = updates.mask(lambda params: {"a": {"w": False}, "b": "b" in params})
        assert by_function.opt_params["a"]["w"] == MASKED
        assert by_function.inplace_updates == {"a": {"w": MASKED}}


class TestUpdates:
    def test_deltas_are_added_and_in_place_updates_replace(self):
        updates = make_updates(inplace_updates={"a": {}, "b": 7})
        values = updates.updated_values()
        np.testing.assert_array_equal(values["a"]["w"], [1.5, 1.0])
        assert (float(values["b"]), values["b"].dtype) == (7.0, jnp.float32)

    def test_parameters_keep_their_dtype(self):
        low = {"w": OptParam(jnp.ones(2, jnp.bfloat16))}
        for deltas, inplace in (({"w": jnp.ones(2)}, {}), ({"w": MASKED}, {"w": jnp.ones(2)})):
            updates = Updates(opt_params=low, delta_updates=deltas, inplace_updates=inplace)
            assert updates.updated_values()["w"].dtype == jnp.bfloat16

    def test_in_place_updates_must_match(self):
        with pytest.raises(InplaceUpdateError, match=r"'a/v' is not for a parameter.*mean 'a/w'"):
            make_updates(inplace_updates={"a": {"v": 1.0}}).updated_values()
        with pytest.raises(InplaceUpdateError, match=r"'b' has shape \(2,\), but .* has \(\)"):
            make_updates(inplace_updates={"b": jnp.ones(2)}).mask(lambda params: params)


class TestWrapped:
    def test_optimizer_transforms_deltas(self):
        tx = make(as_update_transformation(TRACE))
        assert isinstance(tx, WrappedPartitionedGradientTransformation)
        state = tx.init(PARAMS)
        updates = make_updates(inplace_updates={"b": 1.0})
        for factor in (1.0, 1.5):
            new, state, _ = transform(tx, updates, state)
            # A root has a dict of state updates, in which a state of another type has its name.
            state = state["tx"]
            assert isinstance(state, optax.TraceState)
            np.testing.assert_allclose(new.delta_updates["b"], 4.0 * factor)
        assert new.inplace_updates == {"b": 1.0}

    def test_state_that_is_a_dict_needs_no_name(self):
        chain = config_for_function(optimizers.named_chain).set(kwargs={"momentum": TRACE})
        tx = make(as_update_transformation(chain))
        _, state, _ = transform(tx, make_updates(), tx.init(PARAMS))
        assert list(state) == ["momentum"]

    def test_non_optimizer_is_rejected(self):
        with pytest.raises(TransformationTypeError, match=r"got 1\.0 of type float"):
            make(as_update_transformation(config_for_function(float).set(x=1.0)))


class TestOverride:
    def make(self, *rules):
        cfg = OverrideInplaceUpdateTransformation.default_config()
        return make(cfg.set(transformation=TRACE, rules=list(rules)))

    def test_matching_parameters_become_their_gradients(self):
        tx = self.make("a/.*")
        state = tx.init(PARAMS)
        assert state.trace == {"a": {"w": MASKED}, "b": 0.0}
        new, state, _ = transform(tx, make_updates(), state)
        assert state["tx"].trace == {"a": {"w": MASKED}, "b": 4.0}
        values = new.updated_values()
        np.testing.assert_array_equal(values["a"]["w"], GRADS["a"]["w"])
        np.testing.assert_array_equal(values["b"], 7.0)
        specs = tx.create_state_partition_specs(SPECS)
        assert jax.tree.structure(specs) == jax.tree.structure(state["tx"])

    def test_rule_must_match_the_whole_path(self):
        tx = self.make("a", "w")
        new, _, _ = transform(tx, make_updates(), tx.init(PARAMS))
        assert new.inplace_updates == {}

    def test_frozen_parameters_stay(self):
        tx = self.make("a/w")
        updates = make_updates().mask(
            {"a": {"w": False}, "b": True}, fields=("opt_params", "delta_updates")
        )
        new, _, _ = transform(tx, updates, tx.init(updates.opt_params))
        assert new.inplace_updates == {}


class TestGradientMonitor:
    def run(self, **fields):
        tx = GradientMonitorTransformation.default_config().set(transformation=TRACE, **fields)
        grads = {"a": {"w": jnp.array([3.0, -4.0])}, "b": jnp.array(jnp.inf)}
        params = {**PARAMS, "c": {"gradient_norm": OptParam(jnp.array(0.0))}}
        updates = make_updates(
            opt_params=params, delta_updates={**grads, "c": {"gradient_norm": jnp.array(7.0)}}
        )
        tx = make(tx)
        return transform(tx, updates, tx.init(params))

    def test_each_parameter_is_reported(self):
        new, state, summaries = self.run()
        assert summaries == {
            "gradient_norm/a/w": 5.0,
            "gradient_nonfinite/a/w": 0,
            "gradient_norm/b": np.inf,
            "gradient_nonfinite/b": 1,
            "activation_gradient_norm/c": 7.0,
        }
        assert state["tx"].trace["c"]["gradient_norm"] == MASKED
        np.testing.assert_array_equal(new.updated_values()["a"]["w"], [4.0, -2.0])

    def test_groups(self):
        groups = [("a/.*", "inner"), ("a/w", "unused"), ("c/.*", "unused")]
        _, _, summaries = self.run(groups=groups)
        assert sorted(summaries) == [
            "activation_gradient_norm/c",
            "gradient_nonfinite/inner",
            "gradient_norm/inner",
        ]

    def test_norm_at_an_activation(self):
        cfg = RepeatedRNNLayer.default_config().set(name="rnn", input_dim=2, num_layers=2)
        layer = cfg.set(layer=Monitored.default_config()).instantiate(parent=None)
        params = layer.initialize_parameters_recursively(jax.random.key(0))

        def forward(*, model_params, inputs):
            y, collection = functional(
                layer, prng_key=None, state=model_params, inputs=(inputs,), is_training=True
            )
            return ForwardOutputs(loss=y.sum(), aux={}, output_collection=collection)

        cfg = Learner.default_config().set(name="learner")
        cfg.optimizer = GradientMonitorTransformation.default_config().set(transformation=TRACE)
        learner = cfg.instantiate(parent=None)
        opt_params = jax.tree.map(OptParam, params)
        outputs, collection = functional(
            learner,
            prng_key=None,
            state=learner.init(opt_params),
            inputs={"fn": forward, "inputs": jnp.ones((1, 3, 2)), "opt_params": opt_params},
            method="forward_and_backward",
            is_training=True,
        )
        # The gradient of y = 2 * (2 * x) is 2 at the output of the first layer, and then 1.
        reported = collection.summaries["optimizer"]
        norms = reported["activation_gradient_norm/repeat/layer/monitor"]
        np.testing.assert_allclose(norms, np.sqrt(6) * np.array([2, 1]), rtol=1e-6)
        assert len(reported) == 1
        new = outputs.backward_outputs.updated_params["repeat"]["layer"]["monitor"]
        np.testing.assert_array_equal(new["gradient_norm"], norms)


class Monitored(IdentityCell):
    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("monitor", GradientMonitor.default_config())

    def forward(self, time_major_inputs):
        return self.monitor(2 * time_major_inputs)


class TestConditional:
    def make(self, inner=TRACE, **kwargs):
        return make(ConditionalUpdateTransformation.default_config().set(inner=inner, **kwargs))

    def test_skipped_steps_change_nothing(self):
        tx = self.make(update_schedule=lambda step: step != 1)
        state, deltas = tx.init(PARAMS), []
        for _ in range(3):
            new, state, _ = transform(tx, make_updates(), state)
            deltas.append(float(new.delta_updates["b"]))
        assert deltas == [4.0, 0.0, 6.0]
        assert int(state["step"]) == 3

    def test_inner_replacements_follow_the_schedule(self):
        inner = OverrideInplaceUpdateTransformation.default_config().set(
            transformation=TRACE, rules=["a/w"]
        )
        tx = self.make(inner, update_schedule=lambda step: step > 0)
        updates = make_updates(inplace_updates={"b": jnp.array(9.0)})
        first, state, _ = transform(tx, updates, tx.init(PARAMS))
        np.testing.assert_array_equal(first.updated_values()["a"]["w"], [1.0, 2.0])
        assert float(first.updated_values()["b"]) == 9.0
        second, _, _ = transform(tx, updates, state)
        np.testing.assert_array_equal(second.updated_values()["a"]["w"], GRADS["a"]["w"])


def test_abstract_transformation_names_method():
    tx = make(UpdateTransformation.default_config())
    with pytest.raises(NotImplementedError, match="must define `transform_update`"):
        tx(make_updates())
