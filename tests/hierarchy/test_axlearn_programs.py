"""Programs as users of AXLearn write them.

Values of metrics, summaries and losses that a test says are AXLearn's were found by calling AXLearn
0.0.1 with these arguments.
"""

import dataclasses
from collections import namedtuple

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import metrics as sklearn_metrics

from weft.config import REQUIRED, ConfigBase, Required, config_class
from weft.errors import LayerConfigError, UnknownFieldError
from weft.hierarchy import metrics_correlation, metrics_retrieval
from weft.hierarchy.attention import (
    BaseAttentionBias,
    CausalAttentionBias,
    MultiheadAttention,
    SlidingWindowAttentionBias,
    StackedTransformerLayer,
)
from weft.hierarchy.base_layer import (
    BaseLayer,
    ParameterSpec,
    RedirectToSharedModule,
    TensorStats,
)
from weft.hierarchy.causal_lm import Model, gpt_decoder_config
from weft.hierarchy.decoding import StopOnMaxLength
from weft.hierarchy.layers import LayerNorm
from weft.hierarchy.metrics import WeightedScalar
from weft.hierarchy.module import Summable, current_context
from weft.hierarchy.module import functional as F
from weft.hierarchy.param_init import (
    PARAM_REGEXP_BIAS,
    PARAM_REGEXP_WEIGHT,
    ConstantInitializer,
    DefaultInitializer,
    FanAxes,
)
from weft.hierarchy.rnn import LSTMCell
from weft.hierarchy.transforms import scan_in_context
from weft.utils import PerParamFn, per_param_dtype_by_path

# Configs.


class Head(RedirectToSharedModule):
    """Redirects to a layer whose sizes a parent sets, and has none itself."""

    class Config(RedirectToSharedModule.Config):
        def set(self, **kwargs):
            return super().set(**{name: x for name, x in kwargs.items() if name in self.keys()})


def test_a_config_may_override_set():
    cfg = Head.default_config().set(shared_module="emb", vocab_size=8)
    assert (cfg.shared_module, cfg.clone(embedding_dim=4).shared_module) == ("emb", "emb")
    with pytest.raises(UnknownFieldError):
        RedirectToSharedModule.default_config().set(vocab_size=8)


class Square(BaseLayer):
    class Config(BaseLayer.Config):
        dim: Required[int] = REQUIRED

        def __getattr__(self, name):
            if name == "area":
                return self.dim**2
            raise AttributeError(name)

    def forward(self):
        return self.config.area


def test_a_config_may_override_getattr():
    cfg = Square.default_config().set(name="square", dim=3)
    assert (cfg.area, cfg.clone(dim=4).area, cfg.dim) == (9, 16, 3)
    layer = cfg.instantiate(parent=None)
    assert F(layer, None, {}, (), is_training=False)[0] == 9


Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Record:
    rate: float
    parts: dict
    cache: object = dataclasses.field(default=None, metadata={"skip_serialization": True})


@attrs.define
class Attributes:
    rate: float
    cache: object = attrs.field(default=None, metadata={"skip_serialization": True})


def test_records_are_dicts_in_flat_configs():
    @config_class
    class Config(ConfigBase):
        point: Point = Point(1, (2, 3))
        record: Record = Record(0.5, {"a": 4}, cache=5)
        attributes: Attributes = Attributes(0.1, cache=6)

    assert Config().to_flat_dict(omit_default_values=()) == {
        "attributes['rate']": 0.1,
        "point['x']": 1,
        "point['y'][0]": 2,
        "point['y'][1]": 3,
        "record['rate']": 0.5,
        "record['parts']['a']": 4,
    }
    assert Config().to_dict() == {
        "attributes": {"rate": 0.1},
        "point": {"x": 1, "y": (2, 3)},
        "record": {"rate": 0.5, "parts": {"a": 4}},
    }
    assert "record['rate']: 0.5\n" in Config().debug_string()
    assert Config().get_recursively("record['parts']['a']") == 4


# Initializers.


def test_fan_axes_are_sets_of_axes():
    assert FanAxes((0, 1), 2) == FanAxes((1, 0), (2,))
    assert hash(FanAxes((0, 1), 2)) == hash(FanAxes((1, 0), (2,)))
    assert FanAxes(0, 1, None) == FanAxes(0, 1)
    assert FanAxes(0, 1) != FanAxes(1, 0)
    none = FanAxes.AxisType.NONE
    assert FanAxes(0, -1).prepend_axis(axis_type=none) == FanAxes(1, -1)
    assert FanAxes(0, -1).append_axis(axis_type=none) == FanAxes(0, -2)


def test_an_initializer_has_its_defaults_in_its_config():
    one = ConstantInitializer.default_config().set(value=1.0)
    cfg = DefaultInitializer.default_config().set(init_by_param_name={PARAM_REGEXP_WEIGHT: one})
    by_name = cfg.instantiate().config.init_by_param_name
    assert by_name[PARAM_REGEXP_WEIGHT] == one
    assert by_name[PARAM_REGEXP_BIAS].value == 0
    assert list(cfg.init_by_param_name) == [PARAM_REGEXP_WEIGHT]


# Modules and contexts.


class Parent(BaseLayer):
    class Config(BaseLayer.Config):
        child: Required[BaseLayer.Config] = REQUIRED

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("child", cfg.child)

    def forward(self, *args):
        return self.child(*args)


def run(child, *args, state=None):
    parent = Parent.default_config().set(name="parent", child=child.default_config())
    layer = parent.instantiate(parent=None)
    return F(layer, None, {"child": {} if state is None else state}, args, is_training=True)


class Chosen(BaseLayer):
    """Opens a context for one private method more, and for one public method less."""

    def _methods_to_wrap_for_auto_child_context(self):
        methods = super()._methods_to_wrap_for_auto_child_context()
        assert {"forward", "plain"} <= methods.keys()
        del methods["plain"]
        return {**methods, "_private": self._private}

    def plain(self):
        return current_context().name

    def _private(self):
        return current_context().name

    def forward(self): ...


class Asking(Parent):
    def forward(self):
        return self.child.plain(), self.child._private()


def test_methods_that_open_a_context_may_be_chosen():
    cfg = Asking.default_config().set(name="parent", child=Chosen.default_config())
    names, _ = F(cfg.instantiate(parent=None), None, {"child": {}}, (), is_training=False)
    assert names == ("parent", "child")


class Setting(BaseLayer):
    def forward(self, x):
        self.get_invocation_context().set_state_update(x)


def test_a_state_may_be_one_array():
    _, outputs = run(Setting, jnp.ones(2), state=jnp.zeros(2))
    np.testing.assert_array_equal(outputs.state_updates["child"], [1, 1])


class Reporting(BaseLayer):
    def forward(self, x, paddings):
        self._add_activation_summary(name="all", activations=x)
        self._add_activation_summary(name="live", activations=x, activation_paddings=paddings)


def test_activation_summaries():
    x = jnp.arange(1.0, 9).reshape(2, 2, 2)
    _, outputs = run(Reporting, x, jnp.array([[0, 1], [0, 0]]))
    found = {
        name: (float(summary.mean), float(summary.weight))
        for name, summary in outputs.summaries["child"].items()
    }
    # Those of AXLearn: of two examples, and of the three positions (1, 2), (5, 6) and (7, 8).
    assert found == {
        "activations/all_mean": pytest.approx((4.5, 2)),
        "activations/all_norm": pytest.approx((4.6670327, 2)),
        "activations/live_mean": pytest.approx((4.8333335, 3)),
        "activations/live_norm": pytest.approx((4.8734894, 3)),
    }


class Sum(BaseLayer):
    def forward(self, xs):
        total, _ = scan_in_context(
            lambda carry, x: (carry + x, None), carry=jnp.zeros(()), xs={"xs": xs}
        )
        return total


def test_scanned_arrays_may_be_named_xs():
    assert run(Sum, jnp.arange(4.0))[0] == 6


def test_protocols_can_be_asked_for():
    summables = [1, 0.5, jnp.ones(2), WeightedScalar(1.0, 2.0)]
    assert all(isinstance(x, Summable) for x in summables)
    assert not isinstance(None, Summable) and not isinstance({}, Summable)
    assert isinstance(per_param_dtype_by_path(jnp.float32), PerParamFn)
    assert not isinstance("bfloat16", PerParamFn)


def test_an_lstm_with_a_hidden_dim_projects_its_output():
    def shapes(**dims):
        cfg = LSTMCell.default_config().set(name="cell", input_dim=2, **dims)
        specs = cfg.instantiate(parent=None).create_parameter_specs_recursively()
        return {name: spec.shape for name, spec in specs.get("output_proj", {}).items()}

    assert shapes(hidden_dim=3, output_dim=4) == {"weight": (3, 4)}
    assert shapes(hidden_dim=3) == {"weight": (3, 2)}
    assert shapes(output_dim=4) == {}


def test_an_lstm_reads_a_checkpoint_of_axlearn():
    cfg = LSTMCell.default_config().set(name="cell", input_dim=3, output_dim=4)
    layer = cfg.set(norm=LayerNorm.default_config()).instantiate(parent=None)
    shapes = jax.tree.map(
        lambda spec: spec.shape,
        layer.create_parameter_specs_recursively(),
        is_leaf=lambda x: isinstance(x, ParameterSpec),
    )
    # One weight for the inputs and the output before, and one norm for all gates.
    assert shapes == {"input_proj": {"weight": (7, 4, 4)}, "norm": {"bias": (4,), "scale": (4,)}}
    weight, of_norm = jnp.cos(jnp.arange(112.0)).reshape(7, 4, 4), jnp.cos(jnp.arange(4.0))
    state = {"input_proj": {"weight": weight}, "norm": {"bias": of_norm, "scale": of_norm}}
    x = jnp.sin(jnp.arange(18.0)).reshape(3, 2, 3)
    y, _ = F(layer, None, state, [x], is_training=True)
    expected = [[0.44491, 0.00269, -0.08008, -0.06515], [0.08312, 0.41368, -0.12024, -0.05567]]
    np.testing.assert_allclose(y[-1], expected, atol=1e-5)


# Attention and language models.


class Constant(BaseAttentionBias):
    def _value(self):
        return jnp.full((1, 1, 2, 2), 3.0)


def test_a_bias_may_define_its_value_in_any_dtype():
    bias = Constant(dtype=jnp.bfloat16)
    assert bias.value().dtype == jnp.bfloat16
    np.testing.assert_array_equal((bias + jnp.ones((1, 1, 2, 2))).value(), np.full((1, 1, 2, 2), 4))


def test_causal_and_a_causal_mask_are_the_same():
    cfg = MultiheadAttention.default_config().set(
        name="attention", query_dim=4, key_dim=4, value_dim=4, num_heads=2, causal=True
    )
    cfg.clone(mask=CausalAttentionBias.default_config()).instantiate(parent=None)
    window = SlidingWindowAttentionBias.default_config(sliding_window_size=2)
    with pytest.raises(
        LayerConfigError, match="causal=True and mask=SlidingWindowAttentionBias are"
    ):
        cfg.clone(mask=window).instantiate(parent=None)


def decoder_config():
    stack = StackedTransformerLayer.default_config()
    stack.layer.self_attention.attention.causal = True
    return gpt_decoder_config(
        stack,
        num_layers=1,
        hidden_dim=4,
        num_heads=2,
        vocab_size=6,
        max_position_embeddings=8,
    )


class Maximum(TensorStats):
    def add_stats(self, name, value):
        self.add_summary("max", jnp.max(value))


def test_a_language_model_returns_its_loss_and_reports_its_activations():
    decoder = decoder_config().set(tensor_stats=Maximum.default_config())
    cfg = Model.default_config().set(name="lm", decoder=decoder, scan_chunk=2)
    batch = {
        "input_ids": jnp.array([[1, 2, 3, 4, 5]]),
        "target_labels": jnp.array([[2, 3, 4, 0, 1]]),  # 0 is padding
    }
    layer = cfg.instantiate(parent=None)
    params = layer.initialize_parameters_recursively(jax.random.key(0))

    def forward(cfg):
        layer = cfg.instantiate(parent=None)
        inputs = {"input_batch": batch, "return_aux": True}
        return F(layer, jax.random.key(1), params, inputs, is_training=True)

    # The last chunk of two positions is filled up.
    (loss, aux), outputs = forward(cfg)
    (whole, _), _ = forward(cfg.clone(scan_chunk=None))
    np.testing.assert_allclose(loss, whole, rtol=1e-6)
    assert (aux["loss"], aux["num_targets"], aux["metrics"]["num_targets"]) == (loss, 4, 4)
    np.testing.assert_allclose(aux["metrics"]["loss_lm"], loss, rtol=1e-6)
    assert outputs.summaries["loss_lm"].weight == 4
    stats = outputs.summaries["decoder"]["tensor_stats"]
    np.testing.assert_allclose(
        stats["norm_outputs"]["max"], jnp.max(aux["hidden_states"]), rtol=1e-6
    )
    assert stats["outputs"].keys() == {"max"}


def test_the_number_of_decoded_tokens_has_axlearns_name():
    stop = StopOnMaxLength(max_num_decodes=2)
    sequences = jnp.zeros((1, 1, 5), int)
    found = [
        stop(index=jnp.array([i]), sequences=sequences, prefix_len=jnp.array([2])).item()
        for i in range(2, 5)
    ]
    assert found == [False, True, True]


# Metrics.

SCORES = jnp.array([[0.1, 0.9, 0.5, 0.5], [0.3, 0.2, 0.1, 0.4], [0.3, 0.2, 0.1, 0.4]])
LABELS = jnp.array([[0, 1, 0, 2], [0, 0, 1, 0], [0, 0, 0, 0]])


def test_average_rank():
    arguments = {"scores": SCORES, "relevance_labels": LABELS}
    found = metrics_retrieval.average_rank(**arguments, query_padding=jnp.array([0, 0, 0]))
    assert found == {"avg_rank": 2.5}  # the first and the last of four
    found = metrics_retrieval.average_rank(**arguments, query_padding=jnp.array([0, 1, 0]))
    assert found == {"avg_rank": 1}


@pytest.mark.parametrize("ignore_ties", [True, False])
def test_gains_of_each_query_equal_those_of_scikit_learn(ignore_ties):
    found = metrics_retrieval.ndcg_at_k(SCORES, LABELS, [1, 2, -1], ignore_ties)
    assert found.keys() == {1, 2, -1}
    # Where ties are ignored, scikit-learn has the later one first.
    scores = np.asarray(SCORES) - 1e-6 * np.arange(4) if ignore_ties else SCORES
    for k, values in found.items():
        end = None if k == -1 else k
        expected = [
            sklearn_metrics.ndcg_score(LABELS[i : i + 1], scores[i : i + 1], k=end)
            for i in range(3)
        ]
        np.testing.assert_allclose(values, expected, rtol=1e-6)


@pytest.mark.parametrize("weight", [None, [1.0, 2.0, 0.0, 3.0, 1.0, 1.0]])
def test_correlation_of_several_classes_equals_that_of_scikit_learn(weight):
    labels, predictions = [0, 1, 1, 0, 2, 2], [0, 2, 0, 0, 2, 1]
    expected = sklearn_metrics.matthews_corrcoef(labels, predictions, sample_weight=weight)
    weights = None if weight is None else jnp.array(weight)
    found = metrics_correlation.matthews_corrcoef(
        jnp.array(labels), jnp.array(predictions), weight=weights
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert metrics_correlation.matthews_corrcoef(jnp.array([1, 1]), jnp.array([0, 1])) == 0
