"""Transformations of JAX itself around a child's call, which hand no context through."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.raw_transformations import RAW
from weft.errors import ContextTransformError
from weft.hierarchy import transforms
from weft.hierarchy.base_layer import BaseLayer, RematSpec
from weft.hierarchy.context import current_context
from weft.hierarchy.layers import Dropout
from weft.hierarchy.module import Module, functional

X = jnp.arange(1.0, 4.0)


class Child(BaseLayer):
    """Has the side effects that its config names, and a result."""

    def forward(self, x, doing=None):
        y = jnp.sin(x * self.state["w"])
        match doing:
            case "summary":
                self.add_summary("mean", y.sum())
            case "state update":
                self.add_state_update("w", self.state["w"] + 1)
            case "all state updates":
                current_context().set_state_update({"w": self.state["w"] + 1})
            case "module output":
                self.add_module_output("y", y)
            case "key":
                y = y + jax.random.uniform(self.prng_key)
        return y


class Root(BaseLayer):
    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("child", Child.default_config())
        self._add_child("again", Child.default_config().set(remat_spec=RematSpec()))
        self._add_child("dropout", Dropout.default_config().set(rate=0.5))

    def forward(self, body):
        return body(self)


STATE = {"child": {"w": jnp.float32(0.5)}, "again": {"w": jnp.float32(0.5)}, "dropout": {}}


def run(body, key=True, is_training=True):
    root = Root.default_config().set(name="root").instantiate(parent=None)
    return functional(
        root,
        jax.random.key(0) if key else None,
        STATE,
        (body,),
        is_training=is_training,
        drop_output_collections=(),
    )


@pytest.mark.parametrize("raw", RAW)
def test_a_pure_call_passes(raw):
    """Also several in one invocation: those of branches, loops, and one after the other."""
    around = RAW[raw][0]

    def body(root):
        first = around(lambda x: root.child(x), X)
        return first + around(root.child, X) + root.child(X) + around(root.again, X)

    for is_training in (True, False):
        with jax.checking_leaks():
            y, outputs = run(body, is_training=is_training)
        np.testing.assert_allclose(y, 4 * np.sin(np.asarray(X) * 0.5), rtol=1e-6)
        assert not jax.tree.leaves(outputs)


REFUSED = {
    "summary": "the summary 'mean' is added",
    "state update": "the state update 'w' is added",
    "all state updates": "state updates are set",
    "module output": "the module output 'y' is added",
    "key": "the PRNG key is read",
}


@pytest.mark.parametrize("doing", REFUSED)
@pytest.mark.parametrize("raw", RAW)
@pytest.mark.parametrize("child", ["child", "again"], ids=["plain", "remat"])
def test_what_would_leak_or_repeat_is_refused_with_the_mend(raw, doing, child):
    around, of_jax, *names = RAW[raw]
    fix = "` or `".join({"scan": "scan_in_context"}.get(name, name) for name in names)
    with pytest.raises(ContextTransformError) as caught:
        run(lambda root: around(lambda x: root.children[child](x, doing), X))
    message = str(caught.value)
    assert message.startswith(f"{REFUSED[doing]} in 'root.{child}' inside of ")
    assert of_jax in message and f"{fix}` of `weft.hierarchy.transforms`" in message
    reason = "draw the same" if doing == "key" else "a tracer would leak"
    assert reason in message
    assert current_context() is None


@pytest.mark.parametrize("raw", RAW)
def test_a_transformation_of_the_hierarchy_inside_is_refused_too(raw):
    around = RAW[raw][0]

    def body(root):
        lifted = transforms.remat(lambda x: root.child(x, "summary"))
        return around(lifted, X)

    with pytest.raises(ContextTransformError, match=r"'mean' is added in 'root\.child'"):
        run(body)


def test_noise_that_would_be_the_same_for_all_rows_is_refused():
    with pytest.raises(ContextTransformError, match=r"'root.dropout' inside of jax.vmap.*`vmap`"):
        run(lambda root: jax.vmap(root.dropout)(X))
    y, _ = run(lambda root: jax.vmap(root.dropout)(X), is_training=False)
    np.testing.assert_array_equal(y, X)


def test_without_a_key_there_is_none_to_refuse():
    class Asking(Module):
        def forward(self, x):
            assert self.prng_key is None
            return x

    asking = Asking.default_config().set(name="asking").instantiate(parent=None)

    def call(x):
        return functional(asking, None, {}, (x,), is_training=True)[0]

    np.testing.assert_array_equal(jax.vmap(call)(X), X)
    y, _ = run(lambda root: jax.vmap(lambda x: root.prng_key is None)(X), key=False)
    assert y.all()


def test_an_invocation_of_its_own_inside_is_whole():
    def body(root):
        def of_row(x):
            state = {"w": jnp.float32(0.5)}
            return functional(root.child, root_key, state, (x, "summary"), is_training=True)

        root_key = root.prng_key
        y, outputs = jax.vmap(of_row)(X)
        root.add_summary("rows", outputs.summaries["mean"])
        return y

    y, outputs = run(body)
    np.testing.assert_array_equal(outputs.summaries["rows"], y)


def test_the_function_of_a_context_takes_part_in_transformations():
    def body(root):
        pure = current_context().functional(lambda x: root.child(x, "summary"))
        y, outputs = jax.vmap(pure)(X)
        root.add_summary("rows", outputs.summaries["child"]["mean"])
        return y

    y, outputs = run(body)
    np.testing.assert_array_equal(outputs.summaries["rows"], y)


def test_what_is_computed_at_once_is_no_transformation():
    def body(root):
        with jax.ensure_compile_time_eval():
            return root.child(X, "summary")

    y, outputs = jax.jit(lambda: run(body))()
    np.testing.assert_allclose(outputs.summaries["child"]["mean"], y.sum(), rtol=1e-6)
