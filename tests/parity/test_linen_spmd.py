"""Names of axes in Linen: the same programs on Flax and on Weft."""

import functools

import flax.linen.partitioning
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import weft.linen.partitioning
from tests.keys import draw
from tests.parity.linen import KEY, same, same_error

X = draw(1, 4, 6)
RULES = (("batch", "data"), ("embed", None), ("mlp", "model"), ("heads", "model"))
normal = jax.nn.initializers.normal(1.0)


@pytest.fixture(autouse=True)
def rules_are_reset():
    yield
    for nn in (flax.linen, weft.linen):
        nn.set_logical_axis_rules(())


def a_mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def model(nn):
    class MLP(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.with_logical_constraint(x, ("batch", "embed"))
            named = nn.with_logical_partitioning
            x = nn.Dense(8, kernel_init=named(normal, ("embed", "mlp")))(x)
            return nn.Dense(6, kernel_init=nn.with_partitioning(normal, ("model", None)))(x)

    return MLP()


def test_model_with_names():
    same(lambda nn: model(nn).init_with_output(KEY, X))


def test_layouts_of_its_variables():
    def program(nn):
        shapes = jax.eval_shape(model(nn).init, KEY, X)
        specs = nn.get_partition_spec(shapes)
        with nn.logical_axis_rules(RULES):
            by_context = nn.logical_to_mesh(specs)
        shardings = nn.logical_to_mesh_sharding(specs, a_mesh(), RULES)
        flat = [specs, by_context, nn.logical_to_mesh(specs, RULES), shardings]
        kernel = specs["params"]["Dense_1"]["kernel"]
        laid = nn.get_sharding(nn.unbox(shapes), a_mesh())
        leaves = jax.tree.leaves((flat, laid), is_leaf=lambda x: hasattr(x, "spec"))
        return [str(x) for x in leaves] + [str(kernel)], {}

    same(program)


def test_model_on_a_mesh():
    def program(nn):
        mlp, mesh = model(nn), a_mesh()
        with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
            specs = nn.get_partition_spec(jax.eval_shape(mlp.init, KEY, X))
            layouts = nn.logical_to_mesh_sharding(specs, mesh, RULES)
            variables = jax.jit(mlp.init, out_shardings=layouts)(KEY, X)
            y = jax.jit(mlp.apply)(variables, X)
        placed = [str(x.sharding.spec) for x in jax.tree.leaves(variables)]
        return (np.asarray(y), placed), jax.tree.map(np.asarray, variables)

    same(program)


@pytest.mark.parametrize("names", [("batch", "mlp"), ("mlp", "heads"), (None, "embed"), None])
def test_names_and_rules(names):
    def program(nn):
        nn.set_logical_axis_rules(RULES)
        plain = nn.logical_to_mesh_axes(names)
        other = nn.logical_to_mesh_axes(names, (("mlp", "data"), ("batch", ("data", "model"))))
        return [str(plain), str(other), list(map(list, nn.get_logical_axis_rules()))], {}

    same(program)


def test_errors():
    same_error(lambda nn: nn.logical_to_mesh_axes(("a", "a"), (("a", "data"),)))


# The older way, with the names in a collection of their own.


def both(program):
    theirs = program(flax.linen, flax.linen.partitioning)
    ours = program(weft.linen, weft.linen.partitioning)
    assert jax.tree.structure(jax.tree.map(str, theirs)) == jax.tree.structure(
        jax.tree.map(str, ours)
    )
    for a, b in zip(jax.tree.leaves(theirs), jax.tree.leaves(ours), strict=True):
        if isinstance(a, str):
            assert a == b
        else:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def layer(nn, partitioning):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _=None):
            param = partitioning.param_with_axes
            kernel = param("kernel", normal, (6, 6), axes=("embed", "mlp"))
            bias = param("bias", normal, (6,), axes=("mlp",), module=self)
            plain = param("plain", normal, (6,))
            mean = partitioning.variable_with_axes("stats", "mean", jnp.zeros, 6, axes=("mlp",))
            if self.is_mutable_collection("stats"):
                mean.value = mean.value + 1
            return x @ kernel + (bias + plain + mean.value)[None], None

    return Layer


def parts(partitioning, variables):
    """Variables as they are, and the names as text."""
    variables, names = dict(variables), {}
    for collection in [name for name in variables if name.endswith("_axes")]:
        layouts = partitioning.get_axis_names(variables.pop(collection))
        flat = jax.tree_util.tree_leaves_with_path(
            layouts, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec)
        )
        names[collection] = [(jax.tree_util.keystr(path), str(x)) for path, x in flat]
    return variables, names


def test_names_in_params_axes():
    def program(nn, partitioning):
        y, variables = layer(nn, partitioning)().init_with_output(KEY, X)
        return y, parts(partitioning, variables)

    both(program)


def test_names_of_parameters_that_are_trees():
    one, two = ("embed", "mlp"), ("mlp",)
    P = jax.sharding.PartitionSpec
    trees = [(one,), (one, two), [one, two], (one, None), {"a": (one, two)}, (), one]

    def program(nn, partitioning):
        names = [partitioning.AxisMetadata(names=tree) for tree in (*trees, P("embed"), (P("a"),))]
        layouts = partitioning.get_axis_names({f"w{i}_axes": x for i, x in enumerate(names)})
        return {}, [str(layouts)]

    both(program)


@pytest.mark.parametrize("frozen", [False, True])
def test_names_of_a_parameter_that_is_a_dict(frozen):
    axes = {"u": ("embed", "mlp"), "v": {"w": ("mlp",), "x": None}}

    def program(nn, partitioning):
        class Model(nn.Module):
            axes: object = None  # as a field it is a FrozenDict

            @nn.compact
            def __call__(self):
                make = lambda _: {"u": jnp.ones((3, 6)), "v": {"w": jnp.ones(6), "x": 1.0}}  # noqa: E731
                partitioning.param_with_axes("tree", make, axes=self.axes or axes)

        variables = Model(axes if frozen else None).init(KEY)
        return {}, parts(partitioning, variables)[1]

    both(program)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"variable_axes": {"params": 0, "stats": 0}, "axis_name": "depth"},
        {"variable_axes": {"params": 1, "stats": 0}},
        {"variable_broadcast": "params", "variable_axes": {"stats": 0}},
    ],
    ids=lambda k: ",".join(k),
)
def test_scans(kwargs):
    def program(nn, partitioning):
        stack = partitioning.scan_with_axes(
            layer(nn, partitioning),
            split_rngs={"params": "params" in kwargs["variable_axes"]},
            length=3,
            axes_collections=("params", "stats"),
            **kwargs,
        )()
        (y, _), variables = stack.init_with_output(KEY, X, None)
        return y, parts(partitioning, variables)

    both(program)


@pytest.mark.parametrize("params", [0, 1])
@pytest.mark.parametrize("collections", [["params", "stats"], ["params", "stats", "params_axes"]])
def test_variables_that_only_enter_or_only_leave(params, collections):
    """A stack is initialized with an axis and applied with `ScanIn`, as large models do."""

    def program(nn, partitioning):
        options = {"split_rngs": {"params": True}, "axes_collections": ("params", "stats")}
        cls = layer(nn, partitioning)

        def results(axis, **of_stats):
            stack = partitioning.scan_with_axes(cls, {**axis, **of_stats}, length=3, **options)()
            ensemble = partitioning.vmap_with_axes(
                cls,
                {**axis, **of_stats},
                {"params": True},
                in_axes=None,
                axis_size=3,
                partitioning_axis_names={"params": "layers", "stats": "layers"},
            )()
            given = {name: variables[name] for name in collections}
            return [m.apply(given, X, None, mutable=["stats"]) for m in (stack, ensemble)]

        first = partitioning.scan_with_axes(
            cls, {"params": params, "stats": 0}, length=3, **options
        )()
        variables = first.init(KEY, X, None)
        axis = {"params": partitioning.ScanIn(params)}
        return results(axis, stats=0), results(axis, stats=partitioning.ScanOut(1))

    both(program)


def test_variables_that_only_enter_cannot_be_made():
    def program(nn):
        partitioning = {flax.linen: flax.linen.partitioning}.get(nn, weft.linen.partitioning)
        axes = {"params": partitioning.ScanIn(0)}
        nn.vmap(nn.Dense, axes, {"params": True})(2).init(KEY, X)

    same_error(program)


def test_names_of_transformed_submodules():
    """They name the parameters, so checkpoints depend on them."""

    def program(nn, partitioning):
        axes, keys = {"params": 0, "stats": 0}, {"split_rngs": {"params": True}}
        shared = {"variable_broadcast": "params", "variable_axes": {"stats": 0}}
        members = {"params": "members", "stats": "runs"}
        cls = layer(nn, partitioning)
        scan = functools.partial(partitioning.scan_with_axes, cls, length=3)
        vmap = functools.partial(partitioning.vmap_with_axes, cls, in_axes=None, axis_size=3)
        classes = [
            scan(axes, **keys),
            scan(axes, axes_collections=(), **keys),
            scan(axes, axes_collections=("params", "stats"), **keys),
            scan(split_rngs={"params": False}, **shared),
            vmap(axes, **keys),
            vmap(axes, partitioning_axis_names=members, **keys),
            partitioning.remat(cls),
            nn.add_metadata_axis(cls, axes),
            nn.add_metadata_axis(cls),
        ]

        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                return [transformed()(x, None) for transformed in classes]

        return sorted(jax.eval_shape(Model().init, KEY, X)["params"])

    both(program)


def test_vmaps():
    def program(nn, partitioning):
        ensemble = partitioning.vmap_with_axes(
            layer(nn, partitioning),
            variable_axes={"params": 0, "stats": 1},
            split_rngs={"params": True},
            in_axes=None,
            axis_size=3,
            partitioning_axis_names={"params": "members", "stats": "runs"},
        )()
        (y, _), variables = ensemble.init_with_output(KEY, X)
        return y, parts(partitioning, variables)

    both(program)


def test_remat():
    def program(nn, partitioning):
        (y, _), variables = partitioning.remat(
            layer(nn, partitioning), static_argnums=(1,)
        )().init_with_output(KEY, X, "static")
        return y, parts(partitioning, variables)

    both(program)
