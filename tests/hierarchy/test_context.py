import jax
import numpy as np
import pytest

from weft.config import config_class
from weft.errors import ContextStackError, InvalidDescendantError, OutputConflictError
from weft.hierarchy.context import (
    InvocationContext,
    OutputCollection,
    child_context,
    current_context,
    fold_in_name,
    install_context_stack,
    new_output_collection,
    set_current_context,
)
from weft.hierarchy.module import Module


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


def test_a_child_derives_its_fields():
    root = root_context()
    child = root.add_child("a")
    assert child.path() == "root.a"
    assert child.state == {"w": 1}
    assert child.is_training
    assert child.prng_key == fold_in_name(root.prng_key, "a")
    child.add_summary("s", 2)
    assert root.get_summaries() == {"a": {"s": 2}}
    assert root.add_child("b").state == {}  # a module without parameters


def test_a_child_may_override_them():
    other = root_context().add_child(
        "eval", module=None or root_context().module, state={}, is_training=False, prng_key=None
    )
    assert (other.state, other.is_training, other.prng_key) == ({}, False, None)


def test_no_key_stays_no_key():
    assert root_context(prng_key=None).add_child("a").prng_key is None


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


def test_an_output_and_a_child_of_one_name():
    root = root_context()
    root.add_summary("a", 1)
    with pytest.raises(OutputConflictError, match=r"'a' is already among the summaries"):
        root.add_child("a")


def test_a_context_is_restored_when_anything_raises():
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


def test_functional_gives_the_outputs_of_one_call():
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


def test_collections_merge_at_the_top():
    collection = new_output_collection()
    collection.add_child("a").summaries["s"] = 1
    collection.update(OutputCollection({"b": 2}, {"w": np.ones(1)}, {}))
    assert collection.summaries == {"a": {"s": 1}, "b": 2}
    assert list(collection.state_updates) == ["a", "w"]
