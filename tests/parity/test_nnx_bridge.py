"""Programs on the bridge between NNX and Linen, run on Flax and on Weft."""

import functools

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.nnx import bridge as flax_bridge

import weft.linen
import weft.nnx
from tests.keys import draw
from weft.nnx import bridge as weft_bridge

# Flax says of some of its names that they will go; what they do is compared all the same.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

FLAX = (flax.nnx, flax.linen, flax_bridge)
WEFT = (weft.nnx, weft.linen, weft_bridge)
OF_FLAX = ("eager_sharding", "hijax", "ref")
KEY, OTHER = jax.random.key(0), jax.random.key(1)
RNGS = {"params": KEY, "dropout": OTHER}
X = draw(3, 4, 3)
PROGRAMS = []


def program(fn):
    PROGRAMS.append(fn)
    return fn


def seen(x):
    """Returns a result in plain Python, in which arrays equal those that are close."""
    if isinstance(x, flax.nnx.State | weft.nnx.State):
        return {k: seen(v) for k, v in x.items()}
    if hasattr(x, "get_raw_value") or hasattr(x, "var_type"):
        metadata = x.metadata if hasattr(x, "var_type") and not hasattr(x, "get_raw_value") else {}
        value = x.get_raw_value() if hasattr(x, "get_raw_value") else x.value
        metadata = metadata or x.get_metadata()
        kept = {k: seen(v) for k, v in sorted(metadata.items()) if k not in OF_FLAX}
        return type(x).__name__, seen(value), kept
    if hasattr(x, "names") and hasattr(x, "value"):
        return type(x).__name__, x.names, seen(x.value)
    if hasattr(x, "items"):
        return {k: seen(v) for k, v in x.items()}
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(x)).tolist()
    if isinstance(x, jax.Array | np.ndarray):
        return Close(x)
    if isinstance(x, list | tuple):
        return [seen(v) for v in x]
    return x.__name__ if isinstance(x, type) else x


class Close:
    """An array that equals those close to it."""

    def __init__(self, x):
        self.x = np.asarray(x)

    def __eq__(self, other):
        same = (self.x.dtype, self.x.shape) == (other.x.dtype, other.x.shape)
        return same and np.allclose(self.x, other.x, rtol=1e-5, atol=1e-6)

    def __repr__(self):
        return f"{self.x.dtype}{self.x.tolist()}"


@pytest.mark.parametrize("case", PROGRAMS, ids=lambda case: case.__name__)
def test_programs_agree(case):
    with flax.nnx.use_eager_sharding(False), weft.nnx.use_eager_sharding(False):
        assert seen(case(*FLAX)) == seen(case(*WEFT))


# NNX in Linen.


@functools.cache  # a name of a kind of variable can be given once
def block(nnx):
    class Count(nnx.Variable):
        pass

    class Block(nnx.Module):
        def __init__(self, n=3, *, rngs):
            init = nnx.with_partitioning(nnx.initializers.normal(), ("a", "b"))
            self.linear = nnx.Linear(n, n, kernel_init=init, rngs=rngs)
            self.norm = nnx.BatchNorm(n, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.layers = nnx.List([nnx.Linear(n, n, rngs=rngs)])
            self.again = self.linear
            self.count = Count(jnp.zeros(()), tag="c")

        def __call__(self, x):
            self.count[...] += 1
            self.sow(nnx.Intermediate, "seen", x.sum())
            x = self.again(self.layers[0](self.linear(x)))
            return self.dropout(self.norm(x))

        def encode(self, x):
            return self.linear(x)

    return Block


@program
def to_linen_init(nnx, nn, bridge):
    return bridge.to_linen(block(nnx)).init_with_output(RNGS, X)


@program
def to_linen_apply(nnx, nn, bridge):
    kind = block(nnx)
    model = bridge.to_linen(kind)
    variables = model.init(RNGS, X)
    return [
        model.apply(variables, X, rngs=RNGS),
        model.apply(variables, X, rngs={"dropout": KEY}),
        model.apply(variables, X, rngs=RNGS, mutable=["batch_stats"]),
        model.apply(variables, X, rngs=RNGS, mutable=["Count", "intermediates"]),
        model.apply(variables, X, nnx_method="encode"),
        model.apply(variables, X, nnx_method=kind.encode),
        jax.jit(lambda v: model.apply(v, X, rngs=RNGS, mutable=True))(variables)[1].keys(),
    ]


@program
def to_linen_in_linen(nnx, nn, bridge):
    class Net(nn.Module):
        def setup(self):
            self.first = bridge.to_linen(nnx.Linear, 3, 3)

        @nn.compact
        def __call__(self, x):
            second = bridge.to_linen(nnx.Linear, 3, 2)
            x = bridge.to_linen(nnx.Linear, 3, 3, use_bias=False, name="named")(self.first(x))
            return second(x)

    return Net().init_with_output(KEY, X)


@program
def to_linen_boxes(nnx, nn, bridge):
    init = nnx.with_partitioning(nnx.initializers.ones, ("a", "b"))
    model = bridge.to_linen(nnx.Linear, 3, 2, kernel_init=init)
    variables = model.init(KEY, X)
    box = variables["params"]["kernel"]
    plain = bridge.to_linen(nnx.Linear, 3, 2, kernel_init=init, metadata_fn=None)
    tagged = bridge.to_linen(
        nnx.Linear, 3, 2, metadata_fn=lambda v: nn.Partitioned(v.get_value(), ("z",))
    )
    return [
        nn.get_partition_spec(variables),
        box.var_type.__name__,
        box.unbox(),
        box.replace_boxed(jnp.ones(2)).value,
        box.to_nnx_variable(),
        plain.init(KEY, X),
        tagged.init(KEY, X),
    ]


@program
def to_linen_without_streams(nnx, nn, bridge):
    class Scale(nnx.Module):
        def __init__(self, by):
            self.by = nnx.Param(jnp.array(by))

        def __call__(self, x):
            return self.by * x

    model = bridge.to_linen(Scale, 2.0, skip_rng=True)
    return model.init_with_output(KEY, X)


@program
def to_linen_in_a_scan(nnx, nn, bridge):
    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(
                lambda layer, x, _: (layer(x), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
            )
            return scan(bridge.to_linen(nnx.Linear, 3, 3, name="layer"), x, None)[0]

    variables = Stack().init(KEY, X)
    return variables, Stack().apply(variables, X)


# Linen in NNX.


def linen_block(nn):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.normal(), ("a", "b"))
            x = nn.Dense(3, kernel_init=init, name="dense")(x)
            x = nn.BatchNorm(use_running_average=False)(x)
            self.sow("intermediates", "seen", x.sum())
            self.variable("counts", "n", lambda: jnp.zeros(())).value += 1
            return nn.Dropout(0.5, deterministic=False)(x)

        @nn.compact
        def encode(self, x):
            return nn.Dense(3, name="dense")(x)

    return Block


def described(nnx, module):
    """Returns the variables of a wrapper by path."""
    return {"/".join(map(str, p)): seen(v) for p, v in nnx.to_flat_state(nnx.state(module))}


@program
def to_nnx_variables(nnx, nn, bridge):
    rngs = nnx.Rngs(0, dropout=1)
    layer = bridge.ToNNX(linen_block(nn)(), rngs)
    assert layer.lazy_init(X) is layer
    return described(nnx, layer), rngs.dropout.count, rngs.default.count


@program
def to_nnx_calls(nnx, nn, bridge):
    layer = bridge.ToNNX(linen_block(nn)(), rngs=nnx.Rngs(0, dropout=1)).lazy_init(X)
    results = [layer(X, mutable=["batch_stats", "counts"])]
    results.append(described(nnx, layer))
    results.append(nnx.jit(lambda m, x: m(x, mutable=True))(layer, X))
    results.append(described(nnx, layer))
    results.append(layer(X, rngs=nnx.Rngs(7), mutable=True))
    results.append(layer(X, rngs=KEY, mutable=True))
    results.append(layer(X, method="encode"))
    results.append(layer(X, method=linen_block(nn).encode))
    return results


@program
def to_nnx_by_key(nnx, nn, bridge):
    layer = bridge.ToNNX(nn.Dense(2), KEY)
    bridge.lazy_init(layer, X)
    grads = nnx.grad(lambda m: m(X).sum())(layer)
    return described(nnx, layer), grads, nnx.Rngs(KEY).default()


@program
def to_nnx_logical(nnx, nn, bridge):
    init = nn.with_logical_partitioning(nn.initializers.ones, ("in", "out"))
    layer = bridge.ToNNX(nn.Dense(2, kernel_init=init), nnx.Rngs(0)).lazy_init(X)
    return layer.kernel, layer(X)


@program
def to_nnx_of_many(nnx, nn, bridge):
    def make(rngs):
        return bridge.ToNNX(nn.Dense(2), rngs=rngs).lazy_init(X)

    layers = nnx.split_rngs(splits=3)(nnx.vmap(make))(nnx.Rngs(0))
    run = nnx.vmap(lambda m, x: m(x), in_axes=(0, None))
    return layers.kernel, run(layers, X)


@program
def lazy_init_of_a_model(nnx, nn, bridge):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = bridge.ToNNX(nn.Dense(3), rngs)
            self.second = nnx.Linear(3, 3, rngs=rngs)
            self.third = bridge.ToNNX(nn.Dense(2), rngs)

        def __call__(self, x):
            return self.third(self.second(self.first(x)))

    model = bridge.lazy_init(Model(nnx.Rngs(0)), X)
    return described(nnx, model), model(X)


@program
def round_trip(nnx, nn, bridge):
    layer = bridge.ToNNX(bridge.to_linen(nnx.Linear, 3, 2), nnx.Rngs(0)).lazy_init(X)
    return described(nnx, layer), layer(X)


@program
def methods_of_wrapped_modules(nnx, nn, bridge):
    class Coder(nn.Module):
        def setup(self):
            self.inner, self.outer = nn.Dense(2), nn.Dense(3)

        def encode(self, x):
            return self.inner(x)

        def __call__(self, x):
            return self.outer(self.encode(x))

    class Encodes(nnx.Module):
        def __init__(self):
            self.coder = bridge.ToNNX(Coder(), nnx.Rngs(0))

        def __call__(self, x):
            return self.coder.encode(x)

    class Counter(nnx.Module):
        def __init__(self):
            self.n = nnx.Cache(jnp.array(0))

        def count(self, by=1):
            self.n[...] += by
            return self.n[...]

    ids = jnp.array([1, 2])
    coder = bridge.ToNNX(Coder(), nnx.Rngs(0)).lazy_init(X)
    model, part = bridge.lazy_init(Encodes(), X), bridge.ToNNX(Coder(), nnx.Rngs(0))
    bridge.lazy_init(part.encode, X)
    embed = bridge.ToNNX(nn.Embed(4, 2), nnx.Rngs(0)).lazy_init(ids)
    of_nnx, counter = bridge.to_linen(nnx.Embed, 4, 2), bridge.to_linen(Counter, skip_rng=True)
    variables, attend = of_nnx.init(KEY, ids), lambda layer, x: layer.attend(x)
    count = {"mutable": True, "method": lambda layer, by: layer.count(by)}
    names = ["features", "scope", "variables", "path", "nope"]
    return [
        (coder.encode(X), described(nnx, coder), [hasattr(coder, name) for name in names]),
        described(nnx, part),
        (model(X), described(nnx, model), nnx.jit(lambda m, x: m.coder.encode(x))(model, X)),
        (embed.attend(jnp.ones((1, 2))), of_nnx.bind(variables).attend(jnp.ones((1, 2)))),
        of_nnx.apply(variables, jnp.ones((1, 2)), method=attend),
        counter.apply({"cache": {"n": jnp.array(2)}}, 3, **count),
        [hasattr(of_nnx, name) for name in ("attend", "num_embeddings", "nope")],
    ]


@program
def initializing_of_wrapped_modules(nnx, nn, bridge):
    found, outputs = [], []

    class Asks(nn.Module):
        @nn.compact
        def __call__(self, x):
            found.append(self.is_initializing())
            return nn.Dropout(0.5, deterministic=False)(nn.Dense(2)(x))

    class Wraps(nnx.Module):
        def __init__(self):
            self.layer = bridge.ToNNX(Asks(), nnx.Rngs(0))

        def __call__(self, x):
            outputs.append(self.layer(x))
            return outputs[-1]

    class Bridges(bridge.Module):
        def setup(self):
            found.append(self.is_initializing())

        @bridge.compact
        def __call__(self, x):
            return bridge.linen_in_bridge_mdl(Asks())(x)

    model = bridge.lazy_init(Wraps(), X)
    keys = {"params": KEY, "dropout": OTHER}
    y, variables = Bridges().init_with_output(keys, X)
    again = Bridges().apply(variables, X, rngs={"dropout": OTHER})
    return found, outputs, model(X), described(nnx, model), y, variables, again


# Modules in the manner of Linen.


def net(nnx, nn, bridge):
    normal = nn.initializers.normal()

    class Scale(bridge.Module):
        def __call__(self, x):
            return x * self.param("s", normal, (3,))[None]

    class WithSetup(bridge.Module):
        def setup(self):
            self.p = self.param("p", normal, ())

        def __call__(self, x):
            return x * self.p

    class Net(bridge.Module):
        n: int = 2

        def setup(self):
            self.sub = Scale()
            self.many = [Scale(), WithSetup()]

        @bridge.compact
        def __call__(self, x):
            init = bridge.with_partitioning(normal, ("a", "b"))
            w = self.param("w", init, (3, self.n))
            c = self.variable("counts", "c", lambda: jnp.zeros(()))
            c.value += 1
            x = Scale(name="inner")(x)
            x = self.many[1](self.many[0](self.sub(Scale()(x))))
            x = bridge.nnx_in_bridge_mdl(lambda rngs: nnx.Linear(3, 3, rngs=rngs))(x)
            return bridge.linen_in_bridge_mdl(nn.Dense(3))(x) @ w.get_value()

        def encode(self, x):
            return self.sub(x)

    return Net


@program
def module_init(nnx, nn, bridge):
    net_class = net(nnx, nn, bridge)
    return [
        net_class().init_with_output(KEY, X),
        net_class(n=3).init(nnx.Rngs(4), X),
        net_class().init({"params": OTHER}, X, method="encode"),
    ]


@program
def module_apply(nnx, nn, bridge):
    model = net(nnx, nn, bridge)()
    variables = model.init(KEY, X)
    return [
        model.apply(variables, X),
        model.apply(variables, X, mutable=True),
        model.apply(variables, X, mutable=["counts"]),
        model.apply(variables, X, method="encode"),
        jax.jit(model.apply)(variables, X),
        jax.tree.map(jnp.shape, jax.eval_shape(model.init, KEY, X)),
        model.scope,
        model.is_initializing(),
    ]


@program
def names_and_parents(nnx, nn, bridge):
    class Dense(bridge.Module):
        n: int = 2

        def __call__(self, x):
            init = nn.initializers.lecun_normal()
            return x @ self.param("kernel", init, (x.shape[-1], self.n))

    class Holds(bridge.Module):
        inner: bridge.Module

        @bridge.compact
        def __call__(self, x):
            return self.inner(x)

    class Named(bridge.Module):
        def setup(self):
            self.a = Dense(3, name="first")
            self.b = Dense(3, parent=self)
            self.c = Dense(3, name="dropped", parent=None)
            self.d = [Dense(3, name="one"), Dense(3, name="two")]
            Dense(3, name="alone")

        @bridge.compact
        def __call__(self, x):
            self.z = Dense(3, name="z_name")
            own = Dense(3, parent=None)
            self.own = own
            for layer in (self.a, self.b, self.c, *self.d, self.z, own, self.alone):
                x = layer(x)
            return self.helper(Holds(Dense(name="held"))(x))

        def helper(self, x):
            return Dense(name="of_helper")(x)

    y, variables = Named().init_with_output(KEY, X)
    return y, variables, Named().apply(variables, X)


@program
def module_keys_and_context(nnx, nn, bridge):
    found = []

    class Asks(bridge.Module):
        child: object = None

        @bridge.compact
        def __call__(self):
            context = bridge.current_context()
            found.append(bridge.current_module() is self)
            found.append((context.module is self, context.in_compact, self.is_initializing()))
            found.append({k.__name__: v for k, v in context.type_counter.items()})
            return self.make_rng(), self.make_rng("noise"), self.make_rng("noise")

    found.append(Asks().apply({}, rngs={"noise": KEY, "default": OTHER}))
    found.append(Asks().apply({}, rngs=KEY))
    found.append(Asks().init(KEY))
    found.append((bridge.current_context(), bridge.current_module()))
    return found


@program
def pure_functions(nnx, nn, bridge):
    linear = bridge.functional(nnx.Linear)(3, 2)
    state = linear.init(rngs=nnx.Rngs(0))
    y, (_, after) = linear.apply(state)(X)
    return state, y, after, linear.module_type, linear.args, linear.kwargs


@program
def priorities(nnx, nn, bridge):
    class Empty(bridge.Module):
        pass

    model = Empty()
    model.b, model.a = nnx.Param(1), nnx.Param(2)
    model.set_attr_priority("b", bridge.AttrPriority.HIGH)
    names = [name for name, _ in nnx.iter_children(model) if name in ("a", "b")]
    return names, [(p.name, int(p)) for p in bridge.AttrPriority], model.attr_priorities


@pytest.mark.parametrize(
    "case",
    [
        lambda nnx, nn, bridge: bridge.ToNNX(nn.Dense(2), nnx.Rngs(0))(X),
        lambda nnx, nn, bridge: bridge.ToNNX(nn.Dense(2)).lazy_init(X),
        lambda nnx, nn, bridge: bridge.lazy_init(lambda x: x, X),
        lambda nnx, nn, bridge: bridge.to_linen(block(nnx)).init(KEY, X),
        lambda nnx, nn, bridge: net(nnx, nn, bridge)().init(None, X),
        lambda nnx, nn, bridge: net(nnx, nn, bridge)().init(KEY, X, method="nope"),
        lambda nnx, nn, bridge: net(nnx, nn, bridge)(name="q"),
    ],
    ids=["not-made", "no-key", "function", "no-stream", "no-params", "no-method", "name"],
)
def test_except_clauses_for_flax_catch_weft_errors(case):
    with pytest.raises(Exception) as theirs:
        case(*FLAX)
    with pytest.raises(Exception) as ours:
        case(*WEFT)
    known = next(c for c in type(theirs.value).__mro__ if c.__module__ == "builtins")
    of_weft = [c.__name__ for c in type(ours.value).__mro__]
    assert known.__name__ in of_weft or type(theirs.value).__name__ in of_weft


# Names of submodules, and fields of modules.


@program
def submodules_made_in_setup(nnx, linen, bridge):
    class Net(bridge.Module):
        def setup(self):
            self.first = bridge.linen_in_bridge_mdl(linen.Dense(4))
            self.many = [bridge.linen_in_bridge_mdl(linen.Dense(4), name="unused")]
            self.last = bridge.nnx_in_bridge_mdl(lambda rngs: nnx.Linear(4, 2, rngs=rngs))

        def __call__(self, x):
            return self.last(self.many[0](self.first(x)))

    variables = Net().init(KEY, X)
    doubled = jax.tree.map(lambda x: 2 * x, variables)
    return variables, Net().apply(variables, X), Net().apply(doubled, X)


@program
def field_called_name(nnx, linen, bridge):
    class Named(bridge.Module):
        name: str

        @bridge.compact
        def __call__(self, x):
            return self.name, x * self.param("w", jax.nn.initializers.ones, ())

    class InSetup(bridge.Module):
        def setup(self):
            self.a, self.b = Named("hello"), Named(name="other")

        def __call__(self, x):
            return self.a(x), self.b(x)

    class Compact(bridge.Module):
        @bridge.compact
        def __call__(self, x):
            return Named("hello")(x), Named(name="other")(x)

    both = [model.init_with_output(KEY, X) for model in (InSetup(), Compact(), Named("top"))]
    return both, Named(name="alone").name


@program
def parameters_through_promote_dtype(nnx, linen, bridge):
    promote_dtype = nnx.nn.dtypes.promote_dtype

    class Layer(bridge.Module):
        @bridge.compact
        def __call__(self, x):
            w = self.param("w", jax.nn.initializers.ones, (3,))
            same = linen.dtypes.promote_dtype(x, w, None, dtype=None)
            parts = (*same, *promote_dtype((x, w, None), dtype=None))
            return [isinstance(part, jax.Array) for part in parts], parts[0] * parts[1][None]

    return Layer().init_with_output(KEY, X)
