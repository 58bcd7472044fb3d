"""Every transformation, with everything that a child may do in it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import Mesh, PartitionSpec

from weft.errors import (
    BranchStructureError,
    LoopOutputError,
    OutputConflictError,
)
from weft.hierarchy import transforms
from weft.hierarchy.context import child_context, current_context
from weft.hierarchy.metrics import WeightedScalar
from weft.hierarchy.module import Module, functional

X = jnp.arange(1.0, 4.0)
W = jnp.float32(0.5)


class Child(Module):
    """Has the side effects that its config names, and a result."""

    def forward(self, x, *doing):
        y = jnp.sin(x * self.state["w"])
        if "summaries" in doing:
            self.add_summary("sum", y.sum())
            self.add_summary("weighted", WeightedScalar(y.mean(), jnp.float32(1)))
        if "state_updates" in doing:
            self.add_state_update("w", self.state["w"] + y.mean())
        if "module_outputs" in doing:
            self.add_module_output("y", y)
        if "randomness" in doing:
            y = y + jax.random.uniform(self.prng_key)
        if "error" in doing:
            raise ValueError("wrong inside")
        return y


class Root(Module):
    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("child", Child.default_config())
        self._add_child("other", Child.default_config())

    def forward(self, body):
        return body(self)


def run(body, w=W):
    root = Root.default_config().set(name="root").instantiate(parent=None)
    state = {"child": {"w": w}, "other": {"w": 2 * w}}
    return functional(
        root, jax.random.key(0), state, (body,), is_training=True, drop_output_collections=()
    )


def mapped_over_one(transformed):
    return lambda f, x: transformed(f)(x[None])[0]


def with_vjp_rule(f, x):
    def backward(pullback, cotangent):
        return pullback(cotangent)

    return transforms.custom_vjp(f, lambda x: transforms.vjp(f, x), backward)(x)


def with_jvp_rule(f, x):
    def rule(primals, tangents, state_tangents):
        return transforms.jvp(f, primals, tangents, state_tangents)

    return transforms.custom_jvp(f, rule)(x)


def one_device(fn):
    mesh, p = Mesh(np.array(jax.devices()[:1]), ("d",)), PartitionSpec("d")
    return transforms.shard_map(fn, mesh=mesh, in_specs=p, out_specs=p)


# Each gives f(x).
UNMAPPED = {
    "jit": lambda f, x: transforms.jit(f)(x),
    "remat": lambda f, x: transforms.remat(f)(x),
    "grad": lambda f, x: transforms.grad(lambda x: ((y := f(x)).sum(), y), has_aux=True)(x)[1],
    "value_and_grad": lambda f, x: transforms.value_and_grad(
        lambda k, x: ((y := f(x)).sum(), y), argnums=(1, 0), has_aux=True
    )(1.0, x)[0][1],
    "vjp": lambda f, x: transforms.vjp(f, x)[0],
    "jvp": lambda f, x: transforms.jvp(f, (x,), (x,))[0],
    "custom_vjp": with_vjp_rule,
    "custom_jvp": with_jvp_rule,
    "checkify": lambda f, x: transforms.checkify(f, checkify.float_checks)(x)[1],
    "cond": lambda f, x: transforms.cond(x[0] < 9, f, f, x),
    "switch": lambda f, x: transforms.switch(x[0].astype(int), [f, f, f], x),
}
STACKED = {
    "vmap": mapped_over_one(lambda f: transforms.vmap(f, state_axis=None)),
    "pmap": mapped_over_one(lambda f: transforms.pmap(f, state_axis=None)),
    "shard_map": lambda f, x: one_device(f)(x),
    "scan": lambda f, x: transforms.scan_in_context(lambda c, x: (c, f(x)), carry=None, xs=x[None])[
        1
    ][0],
}
LOOPS = {
    "while_loop": lambda f, x: transforms.while_loop(
        lambda c: c[0] < 1, lambda c: (c[0] + 1, f(x)), (0, x)
    )[1],
    "fori_loop": lambda f, x: transforms.fori_loop(0, 1, lambda i, _: f(x), x),
    "fori_loop of unknown length": lambda f, x: transforms.fori_loop(
        0, x[0].astype(int), lambda i, _: f(x), x
    ),
}
ALL = {**UNMAPPED, **STACKED, **LOOPS}
# JAX itself has no reverse derivative of these.
FORWARD_ONLY = ("while_loop", "fori_loop of unknown length")


def plain(f, x):
    return f(x)


def assert_equal(a, b):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), a, b)


@pytest.mark.parametrize("name", ALL)
def test_values_and_derivatives_with_respect_to_parameters(name):
    def loss(w, around):
        return run(lambda root: around(root.child, X) ** 2, w)[0].sum()

    with jax.checking_leaks():
        assert_equal(loss(W, ALL[name]), loss(W, plain))
        if name not in (*FORWARD_ONLY, "custom_jvp"):
            assert_equal(jax.grad(loss)(W, ALL[name]), jax.grad(loss)(W, plain))
        if name != "custom_vjp":
            tangents = [jax.jvp(lambda w: loss(w, f), (W,), (W,))[1] for f in (ALL[name], plain)]  # noqa: B023
            assert_equal(*tangents)


OUTPUTS = ("summaries", "state_updates", "module_outputs")


@pytest.mark.parametrize("kind", OUTPUTS)
@pytest.mark.parametrize("name", ALL)
def test_outputs_escape(name, kind):
    around = ALL[name]

    def body(around):
        return lambda root: around(lambda x: root.child(x, kind), X)

    if name in LOOPS:
        with pytest.raises(LoopOutputError, match=rf"'{kind}/child/.*' of the module 'root'"):
            run(body(around))
        return
    with jax.checking_leaks():
        y, outputs = run(body(around))
    expected, wanted = run(body(plain))
    if name == "scan" and kind == "summaries":
        outputs = outputs._replace(summaries=outputs.summaries["iter0"])
    elif name in STACKED:
        wanted = jax.tree.map(lambda x: x[None], wanted)
    if name == "scan" and kind == "module_outputs":
        outputs = outputs._replace(module_outputs=outputs.module_outputs["iter"])
    assert_equal((y, getattr(outputs, kind)), (expected, getattr(wanted, kind)))
    assert jax.tree.structure(getattr(outputs, kind)) == jax.tree.structure(getattr(wanted, kind))


@pytest.mark.parametrize("name", ALL)
def test_randomness(name):
    def draw(around):
        return run(lambda root: around(lambda x: root.child(x, "randomness"), X))[0]

    if name in UNMAPPED:
        assert_equal(draw(ALL[name]), draw(plain))
    else:  # a key of its own
        assert abs(draw(ALL[name]) - draw(plain)).min() > 1e-3


@pytest.mark.parametrize(
    "drawn",
    [
        lambda f: transforms.vmap(f, state_axis=None)(jnp.zeros(3)),
        lambda f: transforms.scan_in_context(lambda c, x: (c, f(x)), carry=None, xs=jnp.zeros(3))[
            1
        ],
        lambda f: transforms.fori_loop(0, 3, lambda i, c: c.at[i].set(f(0.0)), jnp.zeros(3)),
        lambda f: transforms.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1].at[c[0]].set(f(0.0))), (0, jnp.zeros(3))
        )[1],
    ],
    ids=["vmap", "scan", "fori_loop", "while_loop"],
)
def test_indices_and_iterations_draw_separately(drawn):
    numbers, _ = run(lambda root: drawn(lambda x: root.child(x, "randomness")))
    assert len(set(numbers.tolist())) == 3


@pytest.mark.parametrize("name", ALL)
def test_errors_name_the_module_and_restore_context(name):
    with pytest.raises(ValueError, match="wrong inside") as caught:
        run(lambda root: ALL[name](lambda x: root.child(x, "error"), X))
    notes = [note for note in caught.value.__notes__ if "JAX" not in note and note.strip("-")]
    assert notes == ["In Child.forward of module 'root.child'."]
    assert current_context() is None


# `test_outputs_of_nested_transforms` has the others.
OUTER, INNER = ("jit", "vmap", "scan", "cond", "custom_vjp"), (*UNMAPPED, *STACKED)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("outer", OUTER)
def test_outputs_of_nested_transforms(outer, inner):
    def body(root):
        return ALL[outer](lambda x: ALL[inner](lambda x: root.child(x, *OUTPUTS), x), X)

    y, outputs = run(body)
    assert_equal(y, np.sin(np.asarray(X) * 0.5))
    leaves = jax.tree.leaves(
        outputs.summaries["iter0" if outer == "scan" else "child"]
        if inner != "scan" or outer == "scan"
        else outputs.summaries["iter0"]
    )
    assert len(leaves) == 3
    (update,) = jax.tree.leaves(outputs.state_updates)
    assert_equal(update.reshape(()), W + y.mean())
    (given,) = jax.tree.leaves(outputs.module_outputs)
    assert_equal(given.reshape(3), y)


# Features of some transformations.


def test_zero_iterations_keep_the_carry():
    def body(root):
        a = transforms.while_loop(lambda c: c[0] < 0, lambda c: root.child(c), X)
        b = transforms.fori_loop(2, 2, lambda i, c: root.child(c), X)
        c = transforms.fori_loop(2, jnp.int32(1), lambda i, c: root.child(c), X)
        d, ys = transforms.scan_in_context(
            lambda c, x: (root.child(c), x), carry=X, xs=jnp.zeros((0, 2))
        )
        assert ys.shape == (0, 2)
        return a, b, c, d, root.other(X)

    *carries, _ = run(body)[0]
    assert_equal(carries, [X] * 4)


@pytest.mark.parametrize("taken", [True, False])
def test_update_in_one_branch_keeps_state_if_other_is_taken(taken):
    traces = []

    def body(root):
        def updating(x):
            traces.append("updating")
            return root.child(x, "state_updates")

        return transforms.cond(taken, updating, root.other, X)

    y, outputs = run(body)
    updated = W + jnp.sin(X * W).mean()
    assert_equal(y, jnp.sin(X * W * (1 if taken else 2)))
    assert_equal(outputs.state_updates, {"child": {"w": updated if taken else W}, "other": {}})
    assert traces == ["updating"]


def test_child_that_was_invoked_before_is_named_in_a_branch():
    def body(root, name):
        def again(x):
            with child_context(name, module=root.child):
                return root.child(x)

        return root.child(X) + transforms.cond(True, again, lambda x: x, X)

    with pytest.raises(OutputConflictError, match=r"\['child'\] are invoked in one invocation of"):
        run(lambda root: body(root, "child"))
    assert_equal(run(lambda root: body(root, "child_2"))[0], 2 * jnp.sin(X * W))


def test_branches_with_equal_updates_trace_once():
    traces = []

    def body(root):
        def of(name):
            def branch(x):
                traces.append(name)
                return root.child(x, "state_updates")

            return branch

        return transforms.switch(1, [of("a"), of("b")], X)

    run(body)
    assert traces == ["a", "b"]


@pytest.mark.parametrize("kind", ["summaries", "module_outputs"])
def test_output_of_only_one_branch_is_rejected(kind):
    what = {"summaries": "summaries/child/sum", "module_outputs": "module_outputs/child/y"}[kind]
    with pytest.raises(
        BranchStructureError,
        match=f"'{what}' of the module 'root' is there after true_fun, and not after false_fun",
    ):
        run(lambda root: transforms.cond(True, lambda x: root.child(x, kind), root.child, X))


def test_update_of_unknown_state_is_rejected_by_name():
    def updating(x):
        current_context().add_state_update("new", x)
        return x

    with pytest.raises(BranchStructureError, match="'state_updates/new' of the module 'root'"):
        run(lambda root: transforms.cond(True, updating, lambda x: x, X))


def test_gradients_with_respect_to_parameters_in_a_method():
    def body(root):
        y, pullback = transforms.vjp(root.child, X)
        of_state, of_x = pullback(jnp.ones(3))
        _, tangent = transforms.jvp(
            root.other, (X,), (0 * X,), {"child": {"w": 0.0}, "other": {"w": 1.0}}
        )
        return y, of_state, of_x, tangent

    y, of_state, of_x, tangent = run(body)[0]
    assert_equal(y, jnp.sin(X * W))
    assert_equal(of_state, {"child": {"w": (X * jnp.cos(X * W)).sum()}, "other": {"w": 0.0}})
    assert_equal(of_x, W * jnp.cos(X * W))
    assert_equal(tangent, X * jnp.cos(2 * X * W))


def test_custom_rules_define_the_gradients():
    def body(root):
        def backward(scale, pullback, cotangent):
            of_state, of_x = pullback(cotangent)
            return jax.tree.map(lambda g: scale * g, of_state), of_x

        ruled = transforms.custom_vjp(
            lambda x, scale: root.child(x),
            lambda x, scale: transforms.vjp(root.child, x),
            backward,
            nondiff_argnums=(1,),
        )
        return ruled(X, 10.0)

    def loss(w, body):
        return run(body, w)[0].sum()

    plain_gradient = jax.grad(loss)(W, lambda root: root.child(X))
    assert_equal(jax.grad(loss)(W, body), 10 * plain_gradient)


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_shard_map_shards_values_and_outputs(axis_type):
    if jax.device_count() < 2:
        pytest.skip("needs 2 devices")
    types, p = (jax.sharding.AxisType[axis_type],), PartitionSpec("d")
    mesh = jax.make_mesh((2,), ("d",), types, devices=jax.devices()[:2])
    x = jax.device_put(jnp.arange(4.0), jax.NamedSharding(mesh, p))

    def body(root):
        def fn(x):
            return root.child(x, "summaries", "randomness")

        return transforms.shard_map(fn, mesh=mesh, in_specs=p, out_specs=p)(x)

    y, outputs = run(body)
    x = jnp.arange(4.0)
    noise = np.asarray(y) - jnp.sin(x * W)
    assert abs(noise[0] - noise[1]) < 1e-5 < abs(noise[0] - noise[2])
    assert_equal(outputs.summaries["child"]["sum"], jnp.sin(x * W).reshape(2, 2).sum(1))


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
def test_pmap_has_a_device_per_index():
    y, _ = run(lambda root: transforms.pmap(root.child, state_axis=None)(X[:2]))
    assert_equal(y, jnp.sin(X[:2] * W))


def test_eval_shape_adds_no_outputs():
    def body(root):
        shape = transforms.eval_shape(lambda x: root.child(x, *OUTPUTS, "randomness"), X)
        assert (shape.shape, shape.dtype) == ((3,), jnp.float32)
        return root.child(X, "summaries")

    y, outputs = run(body)
    assert_equal(outputs.summaries["child"]["sum"], y.sum())


def test_checkify_returns_the_error():
    error, _ = run(lambda root: transforms.checkify(root.child, checkify.nan_checks)(X * jnp.nan))[
        0
    ]
    assert "nan" in error.get()
    error, _ = run(lambda root: transforms.checkify(root.child, checkify.nan_checks)(X))[0]
    assert error.get() is None


def test_keyword_and_static_arguments():
    def body(root):
        jitted = transforms.jit(
            lambda x, how, *, scale: root.child(x) * scale if how == "scaled" else x,
            static_argnums=1,
        )
        y = jitted(X, "scaled", scale=2.0)
        return y, transforms.grad(lambda x, *, scale: (scale * x).sum(), argnums=-1)(X, scale=3.0)

    y, gradient = run(body)[0]
    assert_equal(y, 2 * jnp.sin(X * W))
    assert_equal(gradient, [3.0] * 3)
