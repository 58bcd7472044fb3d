"""Recurrent cells and loops over sequences of Linen: the same programs on Flax and on Weft."""

import jax
import jax.numpy as jnp
import pytest

from tests.keys import draw, quick_key
from tests.parity.linen import KEY, named, same, same_compiled, same_error

X = draw(1, 2, 5, 3)
IMAGES = draw(2, 2, 3, 4, 2)
LENGTHS = jnp.array([3, 5])
NORMAL = jax.nn.initializers.normal(0.3)
# Compiles in a fraction of the time that orthogonal matrices take; those are drawn in test_cells.
QUICK = {"recurrent_kernel_init": jax.nn.initializers.normal(1.0)}

# Each changes the values, so that options may be tried together.
INITIALIZED = {
    "kernel_init": NORMAL,
    "recurrent_kernel_init": NORMAL,
    "carry_init": NORMAL,
    "activation_fn": jax.nn.relu,
}
OPTIONS = [
    {},
    {"dtype": jnp.bfloat16},
    {"param_dtype": jnp.float16, "recurrent_kernel_init": NORMAL},
]
GATED = {"gate_fn": jax.nn.hard_sigmoid, "bias_init": NORMAL}
MINIMAL = {"forget_bias_init": NORMAL, "activation_bias_init": NORMAL}
CELLS = [
    *(("LSTMCell", kwargs) for kwargs in [*OPTIONS, INITIALIZED | GATED]),
    *(("OptimizedLSTMCell", kwargs) for kwargs in [*OPTIONS, INITIALIZED | GATED]),
    *(("SimpleCell", kwargs) for kwargs in [*OPTIONS, INITIALIZED | {"bias_init": NORMAL}]),
    ("SimpleCell", {"residual": True}),
    *(("GRUCell", kwargs) for kwargs in [*OPTIONS, INITIALIZED | GATED]),
    *(("MGUCell", kwargs) for kwargs in [*OPTIONS, INITIALIZED | MINIMAL]),
    ("MGUCell", {"reset_gate": False, "gate_fn": jax.nn.hard_sigmoid}),
]
cells = pytest.mark.parametrize(
    "name, kwargs", CELLS, ids=lambda v: v if isinstance(v, str) else ",".join(v)
)


@cells
def test_cells(name, kwargs):
    low = {jnp.bfloat16, jnp.float16} & {v for v in kwargs.values() if isinstance(v, type)}
    low = low or any(kwargs.get(k) is not None for k in ("dtype", "param_dtype"))

    def program(nn):
        cell = getattr(nn, name)(4, **kwargs)
        carry = cell.initialize_carry(KEY, (2, 3))
        state = jax.tree.map(lambda c: c + draw(4, 2, 4).astype(c.dtype), carry)
        variables = cell.init(KEY, carry, X[:, 0])
        step = cell.apply(variables, state, X[:, 1])
        return (step, cell.num_feature_axes), (variables, carry)

    same(program, 3e-2 if low else 1e-5)


@named(
    [
        {},
        {"strides": (1,), "padding": "CIRCULAR", "carry_init": NORMAL},
        {"padding": [(0, 2)], "use_bias": False},
        {"dtype": jnp.bfloat16},
        {"param_dtype": jnp.bfloat16},
    ]
)
def test_cells_of_images(kwargs):
    def program(nn):
        cell = nn.ConvLSTMCell(3, (3,), **kwargs)
        carry = cell.initialize_carry(KEY, IMAGES[:, 0].shape)
        state = jax.tree.map(lambda c: c + draw(4, *c.shape).astype(c.dtype), carry)
        variables = cell.init(KEY, carry, IMAGES[:, 0])
        step = cell.apply(variables, state, IMAGES[:, 1])
        return (step, cell.num_feature_axes), (variables, carry)

    same_compiled(program, 3e-2 if "dtype" in kwargs or "param_dtype" in kwargs else 1e-5)


@pytest.mark.parametrize("name", sorted({name for name, _ in CELLS}))
def test_width_is_that_of_the_carry(name):
    def program(nn):
        cell, state = getattr(nn, name)(4, **QUICK), draw(4, 2, 6)
        carry = (draw(5, 2, 6), state) if "LSTM" in name else state
        return nn.RNN(cell, return_carry=True).init_with_output(KEY, X, initial_carry=carry)

    same_compiled(program)


RUNS = [
    {},
    {"reverse": True},
    {"reverse": True, "keep_order": True, "return_carry": True},
    {"keep_order": True, "return_carry": True},
    {"seq_lengths": LENGTHS, "return_carry": True},
    {"seq_lengths": LENGTHS, "reverse": True, "return_carry": True},
    {"seq_lengths": LENGTHS, "reverse": True, "keep_order": True},
    {"time_major": True},
    {"time_major": True, "seq_lengths": LENGTHS, "reverse": True, "return_carry": True},
]


@named(RUNS)
def test_options_of_a_call(kwargs):
    x = X.swapaxes(0, 1) if "time_major" in kwargs else X

    def program(nn):
        rnn = nn.RNN(nn.SimpleCell(4, **QUICK))
        variables = rnn.init(KEY, x, **kwargs)
        return rnn.apply(variables, x, initial_carry=draw(5, 2, 4), **kwargs), variables

    same_compiled(program)


@named(
    [
        {"reverse": True, "keep_order": True},
        {"return_carry": True, "unroll": 3},
        {"time_major": True},
        {"variable_broadcast": ["params", "other"]},
        {"split_rngs": {"params": False, "dropout": True}},
    ]
)
def test_options_of_the_layer(kwargs):
    same_compiled(lambda nn: nn.RNN(nn.LSTMCell(4, **QUICK), **kwargs).init_with_output(KEY, X))


@pytest.mark.parametrize("shape", [(5, 3), (2, 2, 5, 3)])
@pytest.mark.parametrize("name", ["LSTMCell", "SimpleCell"])
def test_batch_axes(name, shape):
    lengths = jnp.full(shape[:-2], 3)

    def program(nn):
        rnn = nn.RNN(getattr(nn, name)(4, carry_init=NORMAL, **QUICK), return_carry=True)
        y, variables = rnn.init_with_output(KEY, draw(6, *shape))
        # With two batch axes, the state that Flax returns has not the shape of one.
        options = {"init_key": KEY, "seq_lengths": lengths, "reverse": True}
        options["return_carry"] = len(shape) == 2
        return (y, rnn.apply(variables, draw(6, *shape), **options)), variables

    same_compiled(program)


def test_images():
    def program(nn):
        rnn = nn.RNN(nn.ConvLSTMCell(3, (3,)), return_carry=True)
        return rnn.init_with_output(KEY, IMAGES, seq_lengths=jnp.array([1, 3]))

    same_compiled(program)


@named(
    [
        {},
        {"seq_lengths": LENGTHS, "return_carry": True},
        {"init_key": KEY},
        {"initial_carry": (draw(7, 2, 4), draw(8, 2, 4))},
        {"reverse": True, "keep_order": False},
    ]
)
def test_both_directions(kwargs):
    def program(nn):
        parts = nn.RNN(nn.GRUCell(4, carry_init=NORMAL, **QUICK)), nn.RNN(nn.SimpleCell(4, **QUICK))
        return nn.Bidirectional(*parts).init_with_output(KEY, X, **kwargs)

    same_compiled(program)


def test_both_directions_with_options():
    def program(nn):
        options = {"merge_fn": jnp.add, "time_major": True, "return_carry": True}
        parts = nn.RNN(nn.GRUCell(4, **QUICK)), nn.RNN(nn.SimpleCell(4, **QUICK))
        return nn.Bidirectional(*parts, **options).init_with_output(KEY, X)

    same_compiled(program)


def test_both_directions_of_one_module():
    def program(nn):
        rnn = nn.RNN(nn.SimpleCell(4, **QUICK))
        return nn.Bidirectional(rnn, rnn).init_with_output(KEY, X)

    same_compiled(program)


def test_cell_with_state_and_randomness():
    def program(nn):
        class Cell(nn.RNNCellBase):
            @nn.compact
            def __call__(self, carry, x):
                steps = self.variable("state", "steps", lambda: jnp.zeros(()))
                x = nn.Dropout(0.5, deterministic=False)(x)
                carry = jnp.tanh(nn.Dense(3)(x) + carry)
                steps.value += 1
                self.sow("intermediates", "carry", carry)
                return carry, carry

            def initialize_carry(self, rng, input_shape):
                return jnp.zeros(input_shape)

            @property
            def num_feature_axes(self):
                return 1

        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                options = {
                    "variable_carry": "state",
                    "variable_axes": {"intermediates": 0},
                    "split_rngs": {"params": False, "dropout": True},
                }
                return nn.RNN(Cell(), **options)(x)

        start = {"state": {"Cell_0": {"steps": jnp.zeros(())}}}
        rngs = {"params": KEY, "dropout": quick_key(1)}
        params = nn.RNN(nn.SimpleCell(3, **QUICK)).init(KEY, X)["params"]["cell"]
        dense = {"kernel": params["i"]["kernel"], "bias": params["i"]["bias"]}
        tree = {"params": {"Cell_0": {"Dense_0": dense}}, **start}
        mutable = ["state", "intermediates"]
        return Model().apply(tree, X, rngs=rngs, mutable=mutable), {}

    same_compiled(program)


def test_gradients():
    def program(nn):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                parts = nn.RNN(nn.OptimizedLSTMCell(4, **QUICK)), nn.RNN(nn.LSTMCell(4, **QUICK))
                x = nn.Bidirectional(*parts)(x, seq_lengths=LENGTHS)
                carry, _ = nn.RNN(nn.MGUCell(2, **QUICK), return_carry=True)(x, seq_lengths=LENGTHS)
                return carry

        variables = Model().init(KEY, X)
        return jax.grad(lambda v: jnp.sum(Model().apply(v, X)))(variables), variables

    same_compiled(program)


def test_metadata():
    def program(nn):
        boxed = nn.with_partitioning(NORMAL, ("in", "out"))
        options = {"kernel_init": boxed, "recurrent_kernel_init": boxed}
        variables = nn.RNN(nn.OptimizedLSTMCell(4, **options)).init(KEY, X)
        return (variables, nn.RNN(nn.LSTMCell(4, **options)).apply(variables, X)), {}

    same_compiled(program)


def test_missing_cell_methods():
    def without(nn):
        class Cell(nn.RNNCellBase):
            def __call__(self, carry, x):
                return carry, x

        return Cell

    assert "num_feature_axes" in same_error(lambda nn: nn.RNN(without(nn)()).init(KEY, X))
    assert "initialize_carry" in same_error(lambda nn: without(nn)().initialize_carry(KEY, (1,)))
