"""

Transformations of JAX itself around a child's call, which hand no context through.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.raw_transformations import RAW
from weft.config import config_class
from weft.errors import (
    ContextStackError,
    ContextTransformError,
    InvalidDescendantError,
    OutputConflictError,
)
from weft.hierarchy import transforms
from weft.hierarchy.base_layer import BaseLayer, RematSpec
from weft.hierarchy.context import (
    InvocationContext,
    OutputCollection,
    child_context,
    current_context,
    install_context_stack,
    new_output_collection,
    set_current_context,
)
from weft.hierarchy.layers import Dropout
from weft.hierarchy.module import Module, functional


class Node(Module):
    @config_class
    class Config(Module.Config):
        children: tuple[str, ...] = ()

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        for name in cfg.children:
            self._add_child(name, Node.default_config())


def root_context(**kwargs):
    module = Node.default_config().set(name="root", children=("a", "b")).instantiate(parent=None)
    fields = dict(  # noqa: C408
        name="root",
        parent=None,
        module=module,
        state={"a": {"w": 1}},
        is_training=True,
        prng_key=jax.random.key(0),
    )
    return InvocationContext(**{**fields, **kwargs})


def test_unknown_children_are_named():
    with pytest.raises(
        InvalidDescendantError, match=r"root has no child 'aa'\. Did you mean 'a'\?"
    ):
        root_context().add_child("aa")
    with pytest.raises(AttributeError, match="InvocationContext has no attribute 'stat'"):
        _ = root_context().stat


def test_outputs_are_added_once():
    root = root_context()
    for add in (root.add_summary, root.add_state_update, root.add_module_output):
        add("x", 1)
        with pytest.raises(OutputConflictError, match=r"'x' is added twice to the .* of root"):
            add("x", 1)
    root.set_state_update({"y": 2})
    assert root.get_state_updates() == {"y": 2}
    assert root.get_module_outputs() == {"x": 1}


def test_context_is_restored_when_anything_raises():
    with set_current_context(root_context()) as root:
        with pytest.raises(ZeroDivisionError), child_context("a"):
            _ = 1 / 0
        assert current_context() is root
    assert current_context() is None


def test_stacks_are_checked():
    with set_current_context(root_context()) as root:
        with (
            pytest.raises(
                ContextStackError, match="root is not a child of the current context root"
            ),
            set_current_context(root_context()),
        ):
            pass
        with set_current_context(root_context(), require_parent=False):
            pass
        with pytest.raises(ContextStackError, match="root is open in this one"):
            install_context_stack([root])


def test_functional_returns_outputs_of_one_call():
    root = root_context()
    root.add_summary("before", 0)

    def method(x):
        context = current_context()
        context.add_summary("x", x)
        return context.prng_key

    key, outputs = root.functional(method)(3)
    assert key == root.prng_key
    assert outputs.summaries == {"x": 3}
    assert root.get_summaries() == {"before": 0}


def test_state_of_what_is_no_module():
    with pytest.raises(InvalidDescendantError, match="None of type NoneType is not a module"):
        root_context().state_of(None)


def test_collections_merge_at_the_top():
    collection = new_output_collection()
    collection.add_child("a").summaries["s"] = 1
    collection.update(OutputCollection({"b": 2}, {"w": np.ones(1)}, {}))
    assert collection.summaries == {"a": {"s": 1}, "b": 2}
    assert list(collection.state_updates) == ["a", "w"]


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
def test_pure_call_passes(raw):
    """Also several in one invocation: those of branches, loops, and one after the other."""
    around = RAW[raw][0]

    def body(root):
        first = around(lambda x: root.child(x), X)
        return first + around(root.child, X) + root.child(X) + around(root.again, X)

    with jax.checking_leaks():
        y, outputs = run(body)
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
def test_side_effects_in_raw_transformations_are_rejected(raw, doing, child):
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
def test_hierarchy_transform_inside_is_rejected(raw):
    around = RAW[raw][0]

    def body(root):
        lifted = transforms.remat(lambda x: root.child(x, "summary"))
        return around(lifted, X)

    with pytest.raises(ContextTransformError, match=r"'mean' is added in 'root\.child'"):
        run(body)


def test_noise_shared_by_all_rows_is_rejected():
    with pytest.raises(ContextTransformError, match=r"'root.dropout' inside of jax.vmap.*`vmap`"):
        run(lambda root: jax.vmap(root.dropout)(X))
    y, _ = run(lambda root: jax.vmap(root.dropout)(X), is_training=False)
    np.testing.assert_array_equal(y, X)


def test_transforms_allowed_without_a_key():
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


def test_functional_inside_a_raw_transformation():
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


def test_function_of_a_context_takes_part_in_transformations():
    def body(root):
        pure = current_context().functional(lambda x: root.child(x, "summary"))
        y, outputs = jax.vmap(pure)(X)
        root.add_summary("rows", outputs.summaries["child"]["mean"])
        return y

    y, outputs = run(body)
    np.testing.assert_array_equal(outputs.summaries["rows"], y)


def test_eager_computation_is_not_a_transformation():
    def body(root):
        with jax.ensure_compile_time_eval():
            return root.child(X, "summary")

    y, outputs = jax.jit(lambda: run(body))()
    np.testing.assert_allclose(outputs.summaries["child"]["mean"], y.sum(), rtol=1e-6)
