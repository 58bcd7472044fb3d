import functools

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify as jax_checkify
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.keys import draw, quick_key
from weft.core import DenyList, apply, broadcast, init, lift, nn
from weft.core.lift.transforms import roles_of, shared, without_broadcast
from weft.core.scope_kind import Select
from weft.errors import (
    ScopeCollectionNotFound,
    TransformArgumentError,
    VariableAxisError,
)
from weft.lifting import CARRY, FORK, Roles


def test_filters_and_axes_become_roles():
    roles = roles_of({"params": 0, DenyList("params"): None}, {"noise": True, "other": False})
    assert roles.roles == (0, None, FORK, None)
    assert roles.filters[0] == Select("params")
    assert roles.filters[2] == Select(rngs="noise")
    first = roles_of({}, {}, ("state", CARRY))
    assert first == Roles(((Select("state"), CARRY),))
    assert shared(True, "noise").roles == (None,)


@pytest.mark.parametrize("axis", [broadcast, "layers", (lift.In(0), lift.Out(0))], ids=repr)
def test_axes_of_variables_are_checked(axis):
    with pytest.raises(
        TransformArgumentError, match=r"variable_axes=\{'params': .*expected an axis"
    ):
        lift.vmap(nn.dense, {"params": axis}, {})


def test_broadcast_is_none():
    assert without_broadcast((0, broadcast, {"a": broadcast})) == (0, None, {"a": None})
    assert repr(broadcast) == "broadcast"


KEY = quick_key(0)
X = draw(0, 4, 3)
needs_devices = pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices")


@pytest.mark.parametrize("transform", [lift.jit, lift.remat, lift.vmap])
def test_flags_reach_the_lifted_function(transform):
    options = {"variable_axes": {}, "split_rngs": {}} if transform is lift.vmap else {}
    lifted = transform(lambda scope, x: x * scope.get_flag("factor"), **options)
    np.testing.assert_array_equal(apply(lifted, flags={"factor": 2.0})({}, X), 2 * X)


def dense(scope, x):
    return nn.dense(scope, x, 2)


def count(scope, x):
    calls = scope.variable("state", "calls", lambda: jnp.zeros(()))
    calls.value += x.sum()
    return calls.value


def test_variables_that_only_enter_are_read_only():
    def count(scope, x):
        if scope.is_mutable_collection("calls"):
            scope.put_variable("calls", "n", x)
        return scope.get_variable("calls", "n") + x

    mapped = lift.vmap(count, {"calls": lift.In(np.int64(0))}, {})
    y, changed = apply(mapped, mutable=["calls"])({"calls": {"n": jnp.arange(3.0)}}, jnp.ones(3))
    assert y.tolist() == [1, 2, 3]
    assert changed["calls"]["n"].tolist() == [0, 1, 2]


def test_differing_values_are_rejected():
    with pytest.raises(VariableAxisError, match=r"vmap: 'params/kernel' is declared to be the"):
        init(lift.vmap(dense, {"params": None}, {"params": True}))(KEY, X)


def test_unlifted_collection_is_missing():
    with pytest.raises(ScopeCollectionNotFound, match="vmap does not lift the collection 'state'"):
        apply(lift.vmap(count, {"params": 0}, {}), mutable=True)({}, X)


def test_names_of_axes():
    f = lift.vmap(lambda scope, x: jax.lax.psum(x, "batch"), {}, {}, axis_name="batch")
    np.testing.assert_allclose(apply(f)({}, X)[0], X.sum(0), rtol=1e-5)


@needs_devices
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_shard_map_splits_across_devices(axis_type):
    mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4], axis_types=(axis_type,))
    split, whole = PartitionSpec("d"), PartitionSpec()
    x = jax.device_put(X, NamedSharding(mesh, split))

    def f(scope, x):
        seen = scope.variable("state", "seen", lambda: jnp.zeros((1,)))
        seen.value = seen.value + x.sum()
        noise = jax.random.uniform(scope.make_rng("noise"), (1,))
        return scope.get_variable("params", "scale") * jax.lax.psum(x.sum(), "d"), noise

    mapped = lift.shard_map(
        f,
        {"params": whole, "state": split},
        {"noise": True},
        mesh=mesh,
        in_specs=split,
        out_specs=(whole, split),
        check_vma=False,
    )
    variables = {"params": {"scale": jnp.float32(2)}}
    (y, noise), changed = apply(mapped, mutable=["state"])(variables, x, rngs={"noise": KEY})
    np.testing.assert_allclose(y, 2 * X.sum(), rtol=1e-5)
    np.testing.assert_allclose(changed["state"]["seen"], X.sum(1), rtol=1e-5)
    assert len(set(noise.tolist())) == 4


VECTOR = draw(0, 2, 3)


def counted():
    traces = []

    def block(scope, x, *args, **kwargs):
        traces.append(1)
        return nn.dense(scope, x, 3)

    return block, traces


def test_all_layers_share_one_trace():
    block, traces = counted()
    jitted = lift.jit(block)

    def model(scope, x):
        for i in range(5):
            x = jitted(scope.push(f"layer{i}"), x)
        return x

    _, variables = init(model)(KEY, VECTOR)
    kernels = [variables["params"][f"layer{i}"]["kernel"] for i in range(5)]
    assert len({float(k[0, 0]) for k in kernels}) == 5
    assert len(traces) == 1
    traces.clear()
    x = VECTOR
    for i in range(5):
        x = apply(block)({"params": variables["params"][f"layer{i}"]}, x)
    traces.clear()
    np.testing.assert_allclose(apply(model)(variables, VECTOR), x, rtol=1e-5)
    assert len(traces) == 1


def test_equal_functions_compile_once_and_keep_closures():
    def run(scale):
        return apply(lift.jit(lambda scope, x: x * scale))({}, VECTOR)

    for scale in (2.0, 3.0, 2.0):
        np.testing.assert_allclose(run(scale), VECTOR * scale, rtol=1e-6)
    for i in range(20):
        np.testing.assert_allclose(run(float(i)), VECTOR * i, rtol=1e-6)
        array = jnp.full((1, 3), i)
        np.testing.assert_allclose(
            apply(lift.jit(lambda s, x, a=array: x * a))({}, VECTOR), VECTOR * i
        )


def test_explain_recompile():
    f = lift.jit(lambda scope, x: x + scope.get_variable("params", "w", 0.0))
    apply(f)({}, VECTOR)
    assert "nothing was compiled again" in f.explain_recompile()
    apply(f)({}, VECTOR[0])
    assert "float32[2,3] before, float32[3]" in f.explain_recompile()
    apply(f)({"params": {"w": 1.0}}, VECTOR[0])
    assert "'params'" in f.explain_recompile()
    apply(f, mutable=["params"])({"params": {"w": 1.0}}, VECTOR[0])
    assert "mutable" in f.explain_recompile()


def test_static_arguments_and_names():
    def f(scope, x, power, *, negate):
        assert isinstance(power, int)
        return (-1 if negate else 1) * x**power

    jitted = lift.jit(f, static_argnums=2, static_argnames="negate")
    np.testing.assert_allclose(apply(jitted)({}, VECTOR, 2, negate=True), -(VECTOR**2), rtol=1e-5)
    rematted = lift.remat(functools.partial(f, negate=False), static_argnums=(2,))
    np.testing.assert_allclose(apply(rematted)({}, VECTOR, 2), VECTOR**2, rtol=1e-5)


def test_a_static_scope_leaves_the_arguments_of_remat_traced():
    def f(scope, x):
        assert isinstance(x, jax.core.Tracer)
        return 2 * x

    rematted = lift.remat(f, static_argnums=0)
    np.testing.assert_array_equal(apply(rematted)({}, VECTOR), 2 * VECTOR)


def test_jit_device_and_backend():
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    f = lift.jit(lambda scope: jnp.ones(3), device=jax.devices()[1])
    assert apply(f)({}).devices() == {jax.devices()[1]}
    assert apply(lift.jit(lambda scope: jnp.ones(3), backend="cpu"))({}).shape == (3,)


def test_lowering_has_no_effect():
    f = lift.jit(lambda scope, x: scope.put_variable("state", "n", x))

    def lower(scope, x):
        return f.lower(scope, x).as_text(), scope.has_variable("state", "n")

    text, there = apply(lower, mutable=["state"])({}, VECTOR)[0]
    assert "func.func" in text
    assert not there


def test_state_crosses_jit():
    def f(scope, x):
        n = scope.variable("state", "n", lambda: jnp.int32(0))
        n.value += 1
        return x * scope.get_variable("params", "w")

    y, changed = apply(lift.jit(f), mutable=["state"])({"params": {"w": 2.0}}, 3.0)
    assert (y, changed) == (6, {"state": {"n": 1}})


def test_shapes_instead_of_arrays():
    f = lift.eval_shape(lambda scope, x: nn.dense(scope, x, 4))
    shape, variables = init(f)(KEY, VECTOR)
    assert shape.shape == (2, 4)
    assert variables["params"]["kernel"] == jax.ShapeDtypeStruct((3, 4), jnp.float32)


def test_failed_checks_return():
    def f(scope, x):
        jax_checkify.check(jnp.all(x > 0), "not all are positive")
        scope.put_variable("state", "x", x)
        return x

    checked = apply(lift.checkify(f), mutable=["state"])
    (error, _), changed = checked({}, jnp.ones(2))
    assert error.get() is None
    assert changed["state"]["x"].shape == (2,)
    (error, _), _ = checked({}, -jnp.ones(2))
    assert "not all are positive" in error.get()


def test_names_are_shown_in_profiles():
    f = lift.named_call(lambda scope, x: jnp.sin(x), "my_layer")
    text = jax.jit(lambda x: apply(f)({}, x)).lower(VECTOR).as_text(debug_info=True)
    assert "my_layer" in text


INPUTS = draw(0, 2, 3)


def transposed(variables):
    return jax.tree.map(lambda v: v.T, variables)


def dense_map(scope, x, features):
    return nn.dense(scope, x, features, bias=False)


def test_tied_autoencoder():
    decode = lift.map_variables(dense_map, "params", transposed)

    def f(scope, x):
        return decode(scope.rewound(), dense_map(scope, x, 2), 3)

    y, variables = init(f)(KEY, INPUTS)
    kernel = variables["params"]["kernel"]
    np.testing.assert_allclose(y, INPUTS @ kernel @ kernel.T, rtol=1e-5, atol=1e-6)


def test_mask_on_the_parameters():
    def mask(variables):
        return jax.tree.map(jnp.triu, variables)

    f = lift.map_variables(dense_map, "params", mask, init=True)
    y, variables = init(f)(KEY, INPUTS, 3)
    np.testing.assert_allclose(
        y, INPUTS @ jnp.triu(variables["params"]["kernel"]), rtol=1e-5, atol=1e-6
    )


def halves(options):
    """Returns a layer whose weights are kept as halves, and how often it ran."""
    runs = []

    def layer(scope, x):
        runs.append(1)
        return dense_map(scope, x, 3)

    double, half = (lambda v, f=f: jax.tree.map(lambda x: f * x, v) for f in (2.0, 0.5))
    return lambda f: lift.map_variables(f, "params", double, half, **options), layer, runs


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("loop", [False, True])
def test_variables_are_initialized_once_through_nested_maps(depth, loop):
    mapped, layer, runs = halves({"init": True})
    f = layer
    for _ in range(depth):
        f = mapped(f)
    if loop:
        shared = {"variable_broadcast": "params", "split_rngs": {"params": False}}
        body = lift.scan(lambda scope, x, _, f=f: (f(scope, x), None), length=1, **shared)
        f = lambda scope, x: body(scope, x, None)[0]  # noqa: E731
    y, variables = init(f)(KEY, INPUTS)
    assert len(runs) == depth + 1 + loop
    plain = init(layer)(KEY, INPUTS)[1]["params"]["kernel"]
    np.testing.assert_allclose(variables["params"]["kernel"], plain / 2**depth, rtol=1e-6)
    runs.clear()
    np.testing.assert_array_equal(apply(f)(variables, INPUTS), y)
    assert len(runs) == 1
    np.testing.assert_allclose(y, INPUTS @ plain, rtol=1e-5)


def test_mutable_variables_are_initialized_through_map_in_apply():
    mapped, layer, runs = halves({"init": True})
    y, variables = apply(mapped(layer), mutable="params")({}, INPUTS, rngs=KEY)
    assert len(runs) == 2
    np.testing.assert_allclose(y, INPUTS @ (2 * variables["params"]["kernel"]), rtol=1e-5)


def test_fold_rngs_restarts():
    def draw(scope):
        return jax.random.key_data(scope.make_rng("params"))

    def f(scope):
        folded = lift.fold_rngs(draw)
        return draw(scope), folded(scope.push("a")), folded(scope.push("b")), draw(scope)

    keys, _ = init(f)(KEY)
    assert len({tuple(k.tolist()) for k in keys}) == 4
    again, _ = init(f)(KEY)
    np.testing.assert_array_equal(jnp.stack(keys), jnp.stack(again))


def test_keys_of_streams_are_mapped():
    def split(scope_fn, repack_fn, variable_groups, rng_groups):
        rng_groups = lift.tree_map_rngs(lambda key: jax.random.split(key, 2)[1], rng_groups)
        scope = scope_fn(variable_groups, rng_groups)
        return jax.random.uniform(scope.make_rng("noise")), repack_fn(scope)

    packed = apply(lift.pack(split, (), (), (True,)))
    plain = apply(lambda scope: jax.random.uniform(scope.make_rng("noise")))
    second = jax.random.split(KEY, 2)[1]
    assert packed({}, rngs={"noise": KEY}) == plain({}, rngs={"noise": second})
    key = jax.random.key(3)
    assert lift.tree_map_rngs(lambda k: jax.random.fold_in(k, 1), key) == jax.random.fold_in(key, 1)
