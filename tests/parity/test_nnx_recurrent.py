"""Recurrent layers of NNX: the same programs on Flax and on Weft."""

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.keys import draw
from tests.parity.objects import in_half, named, normal, same, same_error, same_signature, tolerance

# Flax deprecates passing the initializer of states here.
pytestmark = pytest.mark.filterwarnings(
    "ignore:carry_init is provided in __init__", "ignore:keep_rngs argument is deprecated"
)

CELLS = ("LSTMCell", "OptimizedLSTMCell", "GRUCell", "SimpleCell")
X = draw(1, 2, 5, 3)
LENGTHS = jnp.array([2, 5])


def stepped(name, rngs_of_carry=None, **kwargs):
    """Returns a program that makes a cell and takes two steps."""

    def program(nnx):
        rngs = nnx.Rngs(0, params=7)
        cell = getattr(nnx, name)(3, 4, rngs=rngs, **kwargs)
        streams = nnx.Rngs(1) if rngs_of_carry is None else rngs_of_carry(nnx)
        carry = cell.initialize_carry((2, 3), streams)
        first, _ = cell(carry, X[:, 0])
        return (carry, cell(first, X[:, 1])), [cell, rngs, streams]

    return program


OPTIONS = [
    {},
    {"dtype": "bfloat16"},
    {
        "kernel_init": jax.nn.initializers.ones,
        "recurrent_kernel_init": normal,
        "bias_init": normal,
        "activation_fn": jax.nn.relu,
    },
    {"promote_dtype": in_half},
    {"keep_rngs": True, "carry_init": normal},
    {
        "kernel_metadata": {"out_sharding": ("a", "b"), "eager_sharding": False},
        "recurrent_kernel_metadata": {"tag": "k"},
        "bias_metadata": {"tag": "b", "sizes": (1, 2)},
    },
]


@named(OPTIONS)
@pytest.mark.parametrize("name", CELLS)
def test_cells(name, kwargs):
    if "promote_dtype" in kwargs:
        kwargs = {"dtype": None, **kwargs}
    same(stepped(name, **kwargs), tolerance(kwargs))


@pytest.mark.parametrize("name", CELLS[:3])
def test_gates(name):
    same(stepped(name, gate_fn=jax.nn.hard_sigmoid))


def test_residual():
    same(stepped("SimpleCell", residual=True))


def test_low_precision_of_parameters():
    same(stepped("LSTMCell", param_dtype="bfloat16"), 2e-2)


@pytest.mark.parametrize(
    "streams",
    [
        lambda nnx: nnx.Rngs(carry=3),
        lambda nnx: nnx.Rngs(3).default,
        lambda nnx: nnx.Rngs(params=1, default=2),
    ],
    ids=["carry", "a stream", "default"],
)
@pytest.mark.parametrize("name", CELLS[1:3])
def test_initial_states(name, streams):
    same(stepped(name, streams, carry_init=normal))


@pytest.mark.parametrize("name", CELLS)
def test_initial_states_from_cell_stream(name):
    def program(nnx):
        cell = getattr(nnx, name)(3, 4, rngs=nnx.Rngs(0), keep_rngs=True)
        made = cell.initialize_carry((2, 3)), cell.initialize_carry((7, 3), None, normal)
        return made, [cell]

    same(program)


def run(cell="GRUCell", call=(), x=X, made=(), own=False, **kwargs):
    """Returns a program that runs a cell, twice."""

    def program(nnx):
        layer = getattr(nnx, cell)(3, 4, rngs=nnx.Rngs(0, params=7), carry_init=normal)
        given = {k: v(nnx) if callable(v) else v for k, v in kwargs.items()}
        layer = nnx.RNN(layer, **given)
        options = {k: v(nnx) if callable(v) else v for k, v in dict(call).items()}
        results = layer(x, **options), layer(x, **options)
        attributes = {
            k: v for k, v in vars(layer).items() if isinstance(v, bool | int) and k[0] != "_"
        }
        return results, [nnx.state(layer), attributes]

    return program


@pytest.mark.parametrize("cell", CELLS)
def test_sequences(cell):
    same(run(cell, return_carry=True))


FORMS = [
    {"time_major": True},
    {"reverse": True},
    {"reverse": True, "keep_order": True},
    {"unroll": 5},
    {"return_carry": True, "reverse": True},
]


@named(FORMS)
def test_forms(kwargs):
    x = X.swapaxes(0, 1) if kwargs.get("time_major") else X
    same(run(x=x, **kwargs))


@named([f for f in FORMS if "unroll" not in f])
def test_forms_in_the_call_with_lengths(kwargs):
    x = X.swapaxes(0, 1) if kwargs.get("time_major") else X
    same(run(x=x, call={"return_carry": True, "seq_lengths": LENGTHS, **kwargs}))


@pytest.mark.parametrize("shape", [(5, 3), (2, 3, 5, 3)], ids=["no batch", "two batch axes"])
def test_batch_axes(shape):
    same(run(x=jax.random.normal(jax.random.key(2), shape), return_carry=True))


@named(
    [
        {"rngs": lambda nnx: nnx.Rngs(3)},
        {"rngs": lambda nnx: nnx.Rngs(carry=3)},
        {"rngs": True},
    ]
)
def test_streams(kwargs):
    same(run(**kwargs))


@pytest.mark.parametrize(
    "streams",
    [lambda nnx: nnx.Rngs(3), lambda nnx: nnx.Rngs(3).default],
    ids=["streams", "a stream"],
)
def test_streams_of_the_call(streams):
    same(run(call={"rngs": streams}))


def test_initial_carry():
    same(run(call={"initial_carry": jnp.ones((2, 4))}, return_carry=True))


def counting(nnx, **kwargs):
    """Returns a custom cell, which counts and draws."""

    class Cell(nnx.RNNCellBase):
        def __init__(self):
            self.n = nnx.Variable(jnp.array(0))
            self.scales = nnx.BatchStat(jnp.arange(5.0))
            self.rngs = nnx.Rngs(0, noise=1)

        def initialize_carry(self, input_shape, rngs=None, carry_init=None):
            return jnp.zeros(input_shape)

        @property
        def num_feature_axes(self):
            return 1

        def __call__(self, carry, x):
            self.n[...] += 1
            noise = self.rngs.noise.uniform((2, 1)), self.rngs.uniform((2, 1))
            return carry + x + self.scales[...].mean(), (carry, *noise)

    layer = nnx.RNN(Cell(), **kwargs)
    return layer(X), [nnx.state(layer)]


@pytest.mark.parametrize(
    "only",
    [
        lambda nnx: None,
        lambda nnx: "noise",
        lambda nnx: nnx.RngState,
        lambda nnx: ...,
        lambda nnx: nnx.Not("noise"),
    ],
    ids=["none", "tag", "type", "all", "not"],
)
def test_broadcast_streams(only):
    same(lambda nnx: counting(nnx, broadcast_rngs=only(nnx)))


@pytest.mark.parametrize(
    "axes",
    [
        lambda nnx: {...: nnx.Carry},
        lambda nnx: nnx.StateAxes({nnx.BatchStat: None, ...: nnx.Carry}),
        lambda nnx: nnx.StateAxes({nnx.BatchStat: 0, ...: nnx.Carry}),
    ],
    ids=["carried", "shared", "stacked"],
)
def test_axes_of_state(axes):
    same(lambda nnx: counting(nnx, state_axes=axes(nnx)))


def both(nnx, call=(), shared=False, carry_init=normal, **kwargs):
    make = functools.partial(nnx.GRUCell, 3, carry_init=carry_init)
    forward = nnx.RNN(make(4, rngs=nnx.Rngs(0)))
    backward = forward if shared else nnx.RNN(make(6, rngs=nnx.Rngs(1)))
    layer = nnx.Bidirectional(forward, backward, **kwargs)
    options = {k: v(nnx) if callable(v) else v for k, v in dict(call).items()}
    return layer(X, **options), [nnx.state(layer)]


@named(
    [
        {},
        {"return_carry": True},
        {"merge_fn": lambda a, b: (a.sum(), b)},
        {"time_major": True},
        {"shared": True, "return_carry": True},
        {"rngs": False},
    ]
)
@pytest.mark.filterwarnings("ignore:forward_rnn and backward_rnn")
def test_both_directions(kwargs):
    same(lambda nnx: both(nnx, **kwargs))


@named(
    [
        {"seq_lengths": LENGTHS, "return_carry": True},
        {"rngs": lambda nnx: nnx.Rngs(3)},
        {"rngs": lambda nnx: nnx.Rngs(3).default},
        {"initial_carry": (jnp.ones((2, 4)), jnp.ones((2, 6)))},
        {"reverse": True, "keep_order": True},
    ]
)
def test_both_directions_in_the_call(kwargs):
    same(lambda nnx: both(nnx, call=kwargs))


def test_gradients_and_transformations():
    def program(nnx):
        layer = nnx.RNN(nnx.LSTMCell(3, 4, rngs=nnx.Rngs(0)))
        grads = nnx.jit(nnx.grad(lambda layer, x: (layer(x) ** 2).sum()))(layer, X)
        return nnx.to_pure_dict(grads), [nnx.state(layer)]

    same(program)


def test_flipping():
    import flax.nnx.nn.recurrent as theirs

    import weft.nnx.nn.recurrent as ours

    x = jnp.arange(20).reshape(2, 5, 2)
    for args in ((LENGTHS, 1, False), (None, 1, False), (None, 1, True), (None, 2, True)):
        assert (theirs.flip_sequences(x, *args) == ours.flip_sequences(x, *args)).all()
    x = x.swapaxes(0, 1)
    flipped = [f.flip_sequences(x, LENGTHS, 1, True).tolist() for f in (theirs, ours)]
    assert flipped[0] == flipped[1]


@pytest.mark.parametrize("name", [*CELLS, "RNN", "Bidirectional"])
def test_signatures(name):
    same_signature(name)
    same_signature(name, "__call__")
    if name in CELLS:
        same_signature(name, "initialize_carry")


@pytest.mark.parametrize(
    "program",
    [
        lambda nnx: nnx.RNNCellBase().initialize_carry((1,)),
        lambda nnx: nnx.RNNCellBase()(1, 2),
        lambda nnx: nnx.RNNCellBase().num_feature_axes,
        lambda nnx: nnx.GRUCell(3, 4, rngs=nnx.Rngs(0)).initialize_carry((2, 3), None, normal),
        lambda nnx: nnx.RNN(nnx.GRUCell(3, 4, rngs=nnx.Rngs(0)), rngs="a"),
        lambda nnx: nnx.RNN(nnx.GRUCell(3, 4, rngs=nnx.Rngs(0)), return_carry=True)(
            X, seq_lengths=jnp.array([1, 2, 3])
        ),
    ],
    ids=["first state", "call", "axes", "no stream", "no streams", "lengths"],
)
def test_errors(program):
    same_error(program)
