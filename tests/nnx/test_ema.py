import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft import nnx
from weft.errors import AverageLeafError, AverageStructureError
from weft.nnx.graph import flatten_graph
from weft.nnx.optimizer import EMA


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.zeros(2), out_sharding=("a",), eager_sharding=False)
        self.layers = [nnx.Dict(b=nnx.Param(jnp.zeros(3)))]
        self.mean = nnx.BatchStat(jnp.zeros(1))


def test_keys_have_no_average():
    model = nnx.Dict(dropout=nnx.Dropout(0.5, rngs=nnx.Rngs(0)), w=nnx.Param(jnp.zeros(2)))
    with pytest.raises(AverageLeafError, match=r"RngKey at 'dropout.rngs.key' .*only=nnx.Param"):
        EMA(model, 0.9)
    ema = EMA(model, 0.75, only=nnx.Param)
    model.w[...] = 4.0
    ema.update(model)
    assert ema.apply_to(model).w.tolist() == [1.0, 1.0]


def test_shared_variables_have_one_average():
    model = Model()
    model.tied = model.w
    ema = EMA(model, 0.5)
    model.w[...] = 4.0
    ema.update(model)
    averaged = ema.apply_to(model)
    assert averaged.tied is averaged.w and averaged.w[0] == 2.0


def test_decay_that_is_an_array_changes_without_a_new_trace():
    model, traces = Model(), []

    @jax.jit
    def step(ema, model):
        traces.append(1)
        ema.update(model)
        return ema

    ema = EMA(model, jnp.array(0.5))
    model.w[...] = 1.0
    ema = step(ema, model)
    ema.decay = jnp.array(1.0)
    ema = step(ema, model)
    assert len(traces) == 1 and ema.params.w[0] == 0.5
    assert flatten_graph(EMA(model, 0.5, only=nnx.Param)).is_tracked


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("w"), "an average for 'w', but no value"),
        (lambda s: s["layers"][0].pop("b"), "average for 'layers/0/b', but no value"),
        (lambda s: s.update(w=jnp.zeros(3)), r"value for 'w' has shape \(3,\).* average \(2,\)"),
        (lambda s: s.update(q=1.0), "a value for 'q', but no average"),
    ],
    ids=["missing", "missing below", "shape", "extra"],
)
def test_mismatched_values_change_nothing(change, message):
    ema = EMA(Model(), 0.5)
    values = jax.tree.map(lambda x: x + 1, nnx.to_pure_dict(nnx.state(Model())))
    change(values)
    with pytest.raises(AverageStructureError, match=message):
        ema.update(values)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), nnx.to_pure_dict(nnx.state(ema)))


def test_only_variables_have_averages():
    model = Model()
    model.layers.append(jnp.ones(2))
    message = r"a ArrayImpl at 'layers/1', and only variables have averages; .* only=nnx.Param"
    with pytest.raises(AverageLeafError, match=message):
        EMA(model, 0.5)
    EMA(model, 0.5, only=nnx.Param)


def test_static_attributes_have_no_average():
    model = Model()
    model.act, model.k, model.rate = jnp.tanh, 3, 0.5
    ema = EMA(model, 0.5)
    model.w[...] = 4.0
    ema.update(model)
    assert ema.params.w.tolist() == [2.0, 2.0] and ema.apply_to(model).k == 3
