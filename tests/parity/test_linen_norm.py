"""Norms of Linen: the same programs on Flax and on Weft."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw
from tests.parity.linen import KEY, named, same, same_compiled, same_error

X = draw(1, 3, 4, 12) * 2 + 1
MASK = np.random.default_rng(9).random(X.shape) < 0.6
# Some values count in each set of axes that is reduced below.
MASK[:2] = MASK[:, :2] = MASK[..., ::2] = True
RANDOM = {"scale_init": jax.nn.initializers.normal(), "bias_init": jax.nn.initializers.normal()}
COMMON = [
    {},
    {"dtype": jnp.bfloat16},
    {"param_dtype": jnp.bfloat16},
    {"dtype": jnp.float32, "param_dtype": jnp.float16, "epsilon": 0.1},
    {"scale_init": jax.nn.initializers.normal(), "use_fast_variance": False},
    {"force_float32_reductions": False, "use_scale": False},
]
BIASED = [*COMMON, {"use_scale": False, "use_bias": False}, {"use_bias": False} | RANDOM, RANDOM]
ALONG = [
    {"reduction_axes": (1, 2), "feature_axes": (2,)},
    {"reduction_axes": (1, 2), "feature_axes": (2, 1)},
    {"reduction_axes": -1, "feature_axes": 1},
    {"reduction_axes": (0,), "feature_axes": (0, -1)},
]
LAYERS = [
    *(("BatchNorm", {"use_running_average": False, **kwargs}) for kwargs in BIASED),
    *(("LayerNorm", kwargs) for kwargs in [*BIASED[-5:], *ALONG]),
    *(("RMSNorm", kwargs) for kwargs in [*COMMON[-3:], *ALONG]),
    *(("GroupNorm", {"num_groups": 3, **kwargs}) for kwargs in BIASED[-4:]),
    *(("InstanceNorm", kwargs) for kwargs in BIASED[-3:]),
    ("GroupNorm", {"num_groups": None, "group_size": 4}),
    ("GroupNorm", {"num_groups": 2, "reduction_axes": (-1,)}),
    ("GroupNorm", {"num_groups": 2, "reduction_axes": (2, 0)}),
    ("GroupNorm", {"num_groups": 2, "reduction_axes": 2}),
    ("InstanceNorm", {"feature_axes": 1}),
    ("InstanceNorm", {"feature_axes": -2}),
    ("LayerNorm", {"force_float32_reductions": False, "param_dtype": jnp.bfloat16}),
    ("BatchNorm", {"use_running_average": False, "axis": 1}),
    ("BatchNorm", {"use_running_average": False, "axis": (2, 1)}),
    ("BatchNorm", {"use_running_average": True, "axis": (0, -1), "param_dtype": jnp.float16}),
]
ids = pytest.mark.parametrize(
    "name, kwargs", LAYERS, ids=lambda v: v if isinstance(v, str) else ",".join(v)
)


def tolerance(*dtypes):
    """Returns the tolerance of results: a value of 8 bits may be rounded to either side."""
    return 3e-2 if jnp.bfloat16 in dtypes else 1e-4


@ids
def test_options(name, kwargs):
    def program(nn):
        layer = getattr(nn, name)(**kwargs)
        variables = layer.init(KEY, X)
        y, updates = layer.apply(variables, X, mutable=["batch_stats"])
        masked = layer.apply(variables, X, mask=MASK, mutable=["batch_stats"])
        return (y, updates, masked), variables

    same_compiled(program, tolerance(*kwargs.values()))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int32])
@named([{}, {"param_dtype": jnp.bfloat16}, {"force_float32_reductions": False}])
@pytest.mark.parametrize("name", ["BatchNorm", "RMSNorm"])
def test_dtypes_of_the_input(name, kwargs, dtype):
    given = {"use_running_average": False} if name == "BatchNorm" else {}
    x = X.astype(dtype)

    def program(nn):
        layer = getattr(nn, name)(**given, **kwargs)
        y, variables = layer.init_with_output(KEY, x)
        return (y, layer.apply(variables, x, mutable=["batch_stats"])), variables

    same_compiled(program, 3e-2)


@pytest.mark.parametrize("name", ["BatchNorm", "LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm"])
@named(
    [
        {},
        {"use_fast_variance": False},
        {"axis_index_groups": [[0, 2], [1, 3]]},
    ]
)
def test_statistics_over_a_mapped_axis(name, kwargs):
    given = {"BatchNorm": {"use_running_average": False}, "GroupNorm": {"num_groups": 2}}
    xs = draw(2, 4, 2, 3, 6)
    mapped = jax.pmap if "axis_index_groups" in kwargs else jax.vmap

    def program(nn):
        layer = getattr(nn, name)(axis_name="parts", **given.get(name, {}), **kwargs)
        plain = getattr(nn, name)(**given.get(name, {}))
        variables = plain.init(KEY, xs[0])
        apply = lambda x: layer.apply(variables, x, mutable=["batch_stats"])  # noqa: E731
        return jax.jit(mapped(apply, axis_name="parts"))(xs), variables

    same_compiled(program)


def test_statistics_over_an_axis_of_devices():
    xs = draw(2, 8, 3, 6)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("data",), axis_types=auto, devices=jax.devices()[:4])
    split, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()

    def program(nn):
        layer = nn.BatchNorm(False, axis_name="data")
        variables = layer.init(KEY, xs)

        @jax.jit
        @jax.shard_map(mesh=mesh, in_specs=(whole, split), out_specs=(split, whole))
        def step(variables, x):
            return layer.apply(variables, x, mutable=["batch_stats"])

        return step(variables, xs), variables

    same_compiled(program)


def test_batch_norm_init_outside_axis():
    same(lambda nn: nn.BatchNorm(False, axis_name="parts").init_with_output(KEY, X))


@pytest.mark.parametrize("name", ["BatchNorm", "InstanceNorm"])
def test_mask_of_positions(name):
    mask = MASK[..., 1:2]
    given = {"use_running_average": False} if name == "BatchNorm" else {}
    same(lambda nn: getattr(nn, name)(**given).init_with_output(KEY, X, mask=mask))


@pytest.mark.parametrize("name", ["BatchNorm", "LayerNorm", "RMSNorm"])
def test_complex_values(name):
    x = X + 1j * draw(3, *X.shape)
    given = {"use_running_average": False} if name == "BatchNorm" else {}

    def program(nn):
        layer = getattr(nn, name)(**given)
        variables = layer.init(KEY, x)
        y, updates = layer.apply(variables, x, mutable=["batch_stats"])
        return (y, updates), variables

    same_compiled(program)


def test_gradients():
    def program(nn):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                x = nn.LayerNorm()(x) + nn.RMSNorm()(x) + nn.GroupNorm(2)(x)
                return nn.BatchNorm(False)(x, mask=MASK)

        model = Model()
        variables = model.init(KEY, X)

        def loss(params, x):
            y, _ = model.apply({**variables, "params": params}, x, mutable=["batch_stats"])
            return jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape)))

        return jax.grad(loss, (0, 1))(variables["params"], X), variables

    same_compiled(program, 2e-4)


def test_running_averages_over_steps():
    def program(nn):
        layer = nn.BatchNorm(momentum=0.8)
        variables = layer.init(KEY, X, use_running_average=False)
        for step in range(5):
            x = draw(step, 8, 12) * step
            _, updates = layer.apply(variables, x, False, mutable=["batch_stats"])
            variables = {**variables, **updates}
        return (variables, layer.apply(variables, X, use_running_average=True)), {}

    same_compiled(program)


@named([{"scale_init": 1, "bias_init": 1}, {"scale_init": 1}])
@pytest.mark.parametrize("name", ["LayerNorm", "BatchNorm"])
def test_metadata(name, kwargs):
    first = {"BatchNorm": (False,), "GroupNorm": (2,)}.get(name, ())

    def program(nn):
        boxed = nn.with_partitioning(jax.nn.initializers.normal(), ("model",))
        layer = getattr(nn, name)(*first, **dict.fromkeys(kwargs, boxed))
        return layer.init_with_output(KEY, X)

    same_compiled(program)


def test_batch_norm_under_vmap_of_a_class():
    def program(nn):
        Each = nn.vmap(
            nn.BatchNorm,
            variable_axes={"params": None, "batch_stats": None},
            split_rngs={"params": False},
            axis_name="examples",
        )
        layer = Each(False, axis_name="examples")
        variables = layer.init(KEY, X)
        return layer.apply(variables, X, mutable=["batch_stats"]), variables

    same_compiled(program)


@pytest.mark.parametrize(
    "program",
    [
        lambda nn: nn.BatchNorm().init(KEY, X),
        lambda nn: nn.BatchNorm(True).init(KEY, X, use_running_average=True),
        lambda nn: nn.GroupNorm(5).init(KEY, X),
        lambda nn: nn.GroupNorm(3, 2).init(KEY, X),
        lambda nn: nn.GroupNorm(None).init(KEY, X),
        lambda nn: nn.GroupNorm(None, 5).init(KEY, X),
        lambda nn: nn.GroupNorm(0).init(KEY, X),
        lambda nn: nn.GroupNorm(3, reduction_axes=(1,)).init(KEY, X),
        lambda nn: nn.InstanceNorm(feature_axes=0).init(KEY, X),
        lambda nn: nn.InstanceNorm(feature_axes=(-1, -3)).init(KEY, X),
    ],
)
def test_errors(program):
    assert same_error(program)
