"""Norms of NNX: the same programs on Flax and on Weft."""

import re

import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import weft.nnx
from tests.keys import draw
from tests.parity.objects import described, in_half, named, normal, same, same_error, same_signature
from weft.errors import WeftError

X = draw(3, 3, 4, 12) * 2 + 1
MASK = np.random.default_rng(9).random(X.shape) < 0.6
# Some values count in each set of axes that is reduced below.
MASK[:2] = MASK[:, :2] = MASK[..., ::2] = True
MASK = jax.device_put(MASK)
COMMON = [
    {},
    {"dtype": jnp.bfloat16},
    {"dtype": jnp.float16, "epsilon": 0.1},
    {"param_dtype": jnp.bfloat16},
    {"dtype": jnp.float32, "param_dtype": jnp.float16},
    {"use_scale": False},
    {"scale_init": normal, "use_fast_variance": False},
    {"promote_dtype": in_half, "scale_metadata": {"tag": "s", "sizes": (1,)}},
]
BIASED = [
    *COMMON,
    {"use_bias": False, "epsilon": 0.1, "scale_init": normal},
    {"use_scale": False, "use_bias": False},
    {
        "scale_init": normal,
        "bias_init": normal,
        "bias_metadata": {"tag": "b"},
        "scale_metadata": {"tag": "s"},
    },
]
ALONG = [
    (4, {"reduction_axes": -1, "feature_axes": 1}),
    (12, {"reduction_axes": (1, 2), "feature_axes": (2,)}),
    (48, {"reduction_axes": (1, 2), "feature_axes": (1, 2), "scale_init": normal}),
    (48, {"reduction_axes": (2, 1), "feature_axes": (-1, -2), "scale_init": normal}),
]
LAYERS = [
    *(("BatchNorm", (12,), kwargs) for kwargs in BIASED),
    *(("LayerNorm", (12,), kwargs) for kwargs in BIASED[-5:]),
    *(("RMSNorm", (12,), kwargs) for kwargs in COMMON[-3:]),
    *(("GroupNorm", (12, 3), kwargs) for kwargs in BIASED[-3:]),
    *(("InstanceNorm", (12,), kwargs) for kwargs in BIASED[-3:]),
    *((name, (n,), kwargs) for name in ("LayerNorm", "RMSNorm") for n, kwargs in ALONG),
    ("GroupNorm", (12, None, 4), {}),
    ("GroupNorm", (12,), {"num_groups": None, "group_size": 2}),
    ("GroupNorm", (12, 2), {"reduction_axes": (-1, 1)}),
    ("InstanceNorm", (4,), {"feature_axes": 1}),
    ("InstanceNorm", (4,), {"feature_axes": (-2,), "scale_init": normal}),
    ("BatchNorm", (12,), {"momentum": 0.5}),
    ("BatchNorm", (4,), {"axis": 1, "scale_init": normal}),
    ("BatchNorm", (12,), {"use_running_average": True}),
    ("BatchNorm", (48,), {"use_running_average": True, "axis": (1, 2)}),
]
ids = pytest.mark.parametrize(
    "name, args, kwargs",
    LAYERS,
    ids=lambda v: v if isinstance(v, str) else ",".join(map(str, v)) or "default",
)


def tolerance(kwargs, x=X):
    """Returns the tolerance of results: a value of 8 bits may be rounded to either side."""
    rough = {"dtype", "param_dtype", "promote_dtype"} & kwargs.keys()
    return 3e-2 if rough or x.dtype == jnp.bfloat16 else 1e-4


def normalized(name, *args, x=X, **kwargs):
    """Returns a program whose results are the layer's and its averages, and whose objects are as
    made.
    """

    def program(nnx):
        rngs = nnx.Rngs(0, params=7)
        layer = getattr(nnx, name)(*args, rngs=rngs, **kwargs)
        made = described([layer, rngs])
        y = layer(x)
        return [y, nnx.to_pure_dict(nnx.state(layer))], made

    return program


@ids
def test_options(name, args, kwargs):
    same(normalized(name, *args, **kwargs), tolerance(kwargs))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int32])
@named([{}, {"param_dtype": jnp.bfloat16}, {"use_scale": False}])
@pytest.mark.parametrize("name", ["BatchNorm", "RMSNorm"])
def test_dtypes_of_the_input(name, kwargs, dtype):
    if kwargs.get("use_scale") is False and name != "RMSNorm":
        kwargs = {**kwargs, "use_bias": False}
    same(normalized(name, 12, x=X.astype(dtype), **kwargs), 3e-2)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("name", ["BatchNorm", "LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm"])
def test_masks(name, fast):
    mask = jnp.broadcast_to(MASK[..., :1], MASK.shape) if name == "GroupNorm" else MASK
    size = (12, 3) if name == "GroupNorm" else (12,)

    def program(nnx):
        layer = getattr(nnx, name)(*size, rngs=nnx.Rngs(0), use_fast_variance=fast)
        y = layer(X, mask=mask)
        return [jnp.where(mask, y, 0), nnx.to_pure_dict(nnx.state(layer))], []

    same(program, 1e-4)


def test_averages_of_several_batches():
    def program(nnx):
        layer = nnx.BatchNorm(12, momentum=0.75, rngs=nnx.Rngs(0))
        out = [layer(X), layer(2 * X + 1), layer(X, use_running_average=True)]
        averages = [layer.mean[...], layer.var[...]]
        layer.eval()
        return [*out, *averages, layer(X), layer(X, False)], [layer.use_running_average]

    same(program, 1e-4)


def test_modes():
    def program(nnx):
        layer = nnx.BatchNorm(12, use_running_average=None, rngs=nnx.Rngs(0))
        view = nnx.view(layer, use_running_average=True)
        seen = [layer.use_running_average, view.use_running_average, view.mean is layer.mean]
        layer.train()
        seen.append(layer.use_running_average)
        layer.set_attributes(use_running_average=True)
        seen.append(layer.use_running_average)
        return [nnx.view(layer, use_running_average=False)(X)], seen

    same(program, 1e-4)


@pytest.mark.parametrize("name", ["BatchNorm", "LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm"])
@named([{}, {"use_fast_variance": False}, {"axis_index_groups": [[0, 2], [1, 3]]}])
def test_statistics_over_a_mapped_axis(name, kwargs):
    xs = jax.random.normal(jax.random.key(4), (4, 2, 3, 6))
    mapped = jax.pmap if "axis_index_groups" in kwargs else jax.vmap
    size = (6, 2) if name == "GroupNorm" else (6,)

    def program(nnx):
        layer = getattr(nnx, name)(*size, axis_name="parts", rngs=nnx.Rngs(0), **kwargs)
        graphdef, state = nnx.split(layer)

        def apply(x, state):
            inner = nnx.merge(graphdef, state)
            y = inner(x)
            return y, nnx.to_pure_dict(nnx.state(inner))

        return jax.jit(mapped(apply, axis_name="parts", in_axes=(0, None)))(xs, state), []

    same(program, 1e-4)


def test_parameters_have_gradients():
    def program(nnx):
        layer = nnx.BatchNorm(12, rngs=nnx.Rngs(0))
        graphdef, params, rest = nnx.split(layer, nnx.Param, ...)

        def loss(params):
            return (nnx.merge(graphdef, params, jax.tree.map(jnp.copy, rest))(X) ** 3).mean()

        return nnx.to_pure_dict(jax.grad(loss)(params)), []

    same(program, 1e-4)


def test_metadata_of_initializers():
    def program(nnx):
        init = nnx.with_metadata(jax.nn.initializers.ones, tag="x", b=2)
        return [], nnx.LayerNorm(3, rngs=nnx.Rngs(0), scale_init=init, scale_metadata={"b": 1})

    same(program)


@pytest.mark.parametrize("call", ["__init__", "__call__"])
@pytest.mark.parametrize("name", ["BatchNorm", "LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm"])
def test_signatures(name, call):
    same_signature(name, call)


FAILURES = {
    "no mode": (
        lambda nnx: bn(nnx, use_running_average=None)(X),
        "use_running_average=None itself",
    ),
    "both group sizes": (lambda nnx: gn(nnx, 2, 2), "num_groups=2 and group_size=2: give one"),
    "no group size": (lambda nnx: gn(nnx, None, None), "num_groups=None and group_size=None"),
    "default groups": (lambda nnx: gn(nnx, group_size=2), "num_groups=32 and group_size=2"),
    "groups of none": (lambda nnx: gn(nnx, 0), "num_groups=0; expected a positive integer"),
    "uneven groups": (lambda nnx: gn(nnx, 5), "cannot be cut into 5 equal groups"),
    "uneven group size": (lambda nnx: gn(nnx, None, 5), "cut into groups of group_size=5"),
    "examples as channels": (
        lambda nnx: nnx.InstanceNorm(3, feature_axes=0, rngs=nnx.Rngs(0))(X),
        "feature_axes=0 .* include the first axis",
    ),
    "no stream": (lambda nnx: nnx.LayerNorm(3, rngs=nnx.Rngs(dropout=0)), "stream 'params'"),
    "no rngs": (lambda nnx: nnx.LayerNorm(3), "rngs"),
}


def bn(nnx, **kwargs):
    return nnx.BatchNorm(12, rngs=nnx.Rngs(0), **kwargs)


def gn(nnx, *args, **kwargs):
    return nnx.GroupNorm(12, *args, rngs=nnx.Rngs(0), **kwargs)


@pytest.mark.parametrize("program, message", FAILURES.values(), ids=FAILURES)
def test_errors(program, message):
    assert re.search(message, same_error(program))


@pytest.mark.parametrize("name", ["BatchNorm", "LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm"])
def test_both_reject_mismatched_inputs(name):
    for nnx, error in ((flax.nnx, Exception), (weft.nnx, WeftError)):
        with pytest.raises(error):
            getattr(nnx, name)(8, *((2,) if name == "GroupNorm" else ()), rngs=nnx.Rngs(0))(X)
