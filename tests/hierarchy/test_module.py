import inspect
import re
import sys
import threading
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import treescope

from weft.config import (
    REQUIRED,
    Required,
    config_class,
    config_for_class,
    config_for_function,
)
from weft.errors import (
    ArgumentValueError,
    ChildConfigError,
    ChildNameConflictError,
    InvalidDescendantError,
    ModuleNameError,
    NoContextError,
    OutputConflictError,
)
from weft.hierarchy.module import (
    Module,
    child_context,
    clone_context_stack,
    current_context,
    functional,
    install_context_stack,
    intercept_module_calls,
    nowrap,
)


class Leaf(Module):
    @config_class
    class Config(Module.Config):
        factor: float = 2.0

    def forward(self, x):
        self.add_summary("mean", x.mean())
        self.add_state_update("calls", self.state["calls"] + 1)
        self.add_module_output("out", x)
        return x * self.config.factor * self.state["w"]

    def key(self):
        return self.prng_key

    def fail(self, x):
        raise ValueError(f"bad {x}")

    @nowrap
    def context_name(self):
        return current_context().name


class Parent(Module):
    @config_class
    class Config(Module.Config):
        leaf: Leaf.Config = Leaf.default_config()
        deep: Required[int] = REQUIRED

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("leaf", cfg.leaf)
        if cfg.deep:
            self._add_child("inner", Parent.default_config().set(deep=cfg.deep - 1))

    def forward(self, x):
        x = self.leaf(x)
        return self.inner(x) if "inner" in self.children else x

    def twice(self, x):
        return self.leaf(self.leaf(x))

    def twice_named(self, x):
        y = self.leaf(x)
        with child_context("again", module=self.leaf):
            return self.leaf(y)

    def deep_leaf(self, x):
        return self.inner.leaf(x) + self.inner.inner.leaf(x)

    def deep_key(self):
        return self.inner.leaf.key()

    def fail(self, x):
        return self.inner.leaf.fail(x)

    def own_name(self):
        return self.leaf.context_name()


def make(deep=2):
    root = Parent.default_config().set(name="root", deep=deep).instantiate(parent=None)
    return root, state_of(deep)


def state_of(deep):
    leaf = {"leaf": {"w": jnp.float32(deep + 1), "calls": jnp.int32(0)}}
    return {**leaf, "inner": state_of(deep - 1)} if deep else leaf


def call(module, state, *args, method="forward", key=None, **kwargs):
    return functional(
        module, prng_key=key, state=state, inputs=args, method=method, is_training=True, **kwargs
    )


def test_tree_has_names_paths_and_children():
    root, _ = make()
    assert root.inner.inner.leaf.path() == "root.inner.inner.leaf"
    assert list(root.children) == ["leaf", "inner"]
    assert root.inner.parent is root
    assert root.path_to_descendant_module(root.inner.leaf) == ["inner", "leaf"]
    assert root.path_to_descendant_module(root) == []


def test_side_outputs_are_nested_as_the_modules_are():
    root, state = make(1)
    out, outputs = call(root, state, jnp.ones(2))
    np.testing.assert_allclose(out, [8, 8])
    assert outputs.summaries == {"leaf": {"mean": 1}, "inner": {"leaf": {"mean": 4}}}
    assert outputs.state_updates["inner"]["leaf"]["calls"] == 1
    assert outputs.module_outputs == {}
    _, outputs = call(root, state, jnp.ones(2), drop_output_collections=("summaries",))
    assert set(outputs.module_outputs) == {"leaf", "inner"}
    assert outputs.summaries == {}


def test_inputs_may_be_named_and_are_copied():
    _, state = make(0)

    def forward(self, batch):
        batch["x"] = batch["x"] + 1
        self.state["new"] = 1
        return batch["x"]

    class Changing(Module):
        pass

    Changing.forward = forward
    module = Changing.default_config().set(name="c").instantiate(parent=None)
    batch, state = {"x": 1}, {"w": 2}
    assert functional(module, None, state, {"batch": batch}, is_training=False)[0] == 2
    assert (batch, state) == ({"x": 1}, {"w": 2})
    functional(module, None, state, {"batch": batch}, is_training=False, copy_args_tree=False)
    assert (batch, state) == ({"x": 2}, {"w": 2, "new": 1})


def test_child_key_folds_its_name_into_the_parents():
    # Recorded values for PRNGKey(123): a child "inner" and below it "leaf" by the md5 of the names.
    root, state = make(1)
    key = jax.random.PRNGKey(123)
    assert call(root, state, method="deep_key", key=key)[0].dtype == jnp.uint32
    import hashlib

    def fold(key, name):
        digest = int(hashlib.md5(name.encode()).hexdigest(), 16)
        return jax.random.fold_in(key, digest % (2**31 - 1))

    np.testing.assert_array_equal(
        call(root, state, method="deep_key", key=key)[0], fold(fold(key, "inner"), "leaf")
    )
    np.testing.assert_array_equal(fold(key, "child"), [849616983, 2420731061])
    assert call(root, state, method="deep_key", key=None)[0] is None


def test_calling_a_child_twice_shows_calls_and_fix():
    root, state = make(0)
    with pytest.raises(OutputConflictError) as caught:
        call(root, state, jnp.ones(1), method="twice")
    message = str(caught.value)
    assert "'leaf' is invoked twice in one invocation of root" in message
    assert message.count("test_module.py:") == 2
    assert "`with child_context('leaf_2', module=self.leaf): self.leaf(...)`" in message
    _, outputs = call(root, state, jnp.ones(1), method="twice_named")
    assert set(outputs.summaries) == {"leaf", "again"}


def second(self, x):
    with child_context("leaf_2", module=self.leaf):
        return self.leaf(x)


def below(self, x):
    return self.inner.leaf(x)


@pytest.mark.parametrize(
    ("method", "fix"),
    [
        (second, "with child_context('leaf_3', module=self.leaf): self.leaf(...)"),
        (below, "with child_context('leaf_2', module=self.inner.leaf): self.inner.leaf(...)"),
    ],
    ids=["named before", "below a child"],
)
def test_fix_for_second_call_runs_as_written(method, fix):
    root, state = make(1)
    fixed = fix.replace("(...)", "(x)")

    class Twice(Parent):
        def twice(self, x, with_fix):
            x = method(self, x)
            if with_fix:
                exec(fixed, {"child_context": child_context}, {"self": self, "x": x})
                return x
            return method(self, x)

    twice = Twice(root.config, parent=None)
    with pytest.raises(OutputConflictError) as caught:
        call(twice, state, jnp.ones(1), False, method="twice")
    assert f"`{fix}`" in str(caught.value)
    call(twice, state, jnp.ones(1), True, method="twice")


@pytest.mark.parametrize("name", ["a.b", "a/b", "", "."])
def test_invalid_names_raise(name):
    root, state = make(0)
    shown = re.escape(repr(name))
    with pytest.raises(ModuleNameError, match=f"a child of root is given the name {shown}; .*'/'"):
        root._add_child(name, Leaf.default_config())
    with pytest.raises(ModuleNameError, match="is given the name 3; expected a string"):
        root._add_child(3, Leaf.default_config())  # pyright: ignore[reportArgumentType]
    assert set(root.children) == {"leaf"}
    with pytest.raises(ModuleNameError, match=f"a root is given the name {shown}"):
        Leaf.default_config().set(name=name).instantiate(parent=None)

    class Renaming(Parent):
        def renamed(self, x):
            with child_context(name, module=self.leaf):
                return self.leaf(x)

    with pytest.raises(ModuleNameError, match=f"a context below root is given the name {shown}"):
        call(Renaming(root.config, parent=None), state, 1.0, method="renamed")


def test_exception_names_path_once_and_keeps_user_frames():
    root, state = make(1)
    with pytest.raises(ValueError, match="bad 3") as caught:
        call(root, state, 3, method="fail")
    assert caught.value.__notes__ == ["In Leaf.fail of module 'root.inner.leaf'."]
    functions = [f.name for f in traceback.extract_tb(caught.value.__traceback__)]
    assert functions[-1] == "fail"
    assert functions.count("fail") == 2


def test_interceptors_nest_with_the_last_one_outermost():
    root, state = make(1)
    seen = []

    def observer(mark):
        def see(module, name, method, args, kwargs):
            seen.append((mark, module.path(), name))
            return method(*args, **kwargs)

        return see

    with intercept_module_calls(observer("a")), intercept_module_calls(observer("b")):
        with pytest.raises(ValueError, match="bad 3"):
            call(root, state, 3, method="fail")
        assert call(root, state, method="own_name")[0] == "root"
    # Methods of the root are called from outside, those with `nowrap` in the caller's invocation.
    assert seen == [("b", "root.inner.leaf", "fail"), ("a", "root.inner.leaf", "fail")]
    with pytest.raises(ValueError, match="bad 3"):
        call(root, state, 3, method="fail")
    assert len(seen) == 2


class RenamedLeaf(Leaf):
    def context_name(self):  # overrides are like the method
        return f"leaf in {current_context().name}"


def test_nowrap_methods_stay_in_the_callers_context():
    root, state = make(0)
    assert call(root, state, method="own_name")[0] == "root"
    cfg = Parent.default_config().set(name="root", deep=0, leaf=RenamedLeaf.default_config())
    root = cfg.instantiate(parent=None)
    assert call(root, state, method="own_name")[0] == "leaf in root"


def test_context_access_outside_an_invocation_raises():
    root, _ = make(0)
    with pytest.raises(
        NoContextError, match="root belongs to an invocation, and none is under way"
    ):
        _ = root.state
    with (
        pytest.raises(NoContextError, match=r"child_context\('leaf'\) belongs to an invocation"),
        child_context("leaf"),
    ):
        pass


def test_functions_and_classes_may_create_children():
    def leaf(width, *, name, parent):
        return Leaf.default_config().set(name=name).instantiate(parent=parent)

    def elsewhere(name, parent):
        return Leaf.default_config().set(name=name).instantiate(parent=None)

    class NoModule:
        def __init__(self, name, parent):
            pass

    def nothing():
        return None

    root, _ = make(1)
    child = root._add_child("made", config_for_function(leaf).set(width=3))
    assert root.made is child and child.path() == "root.made"
    with pytest.raises(ChildConfigError, match=r"makes the Leaf 'x', which has another name "):
        root._add_child("x", config_for_function(elsewhere))
    with pytest.raises(ChildConfigError, match="an object of type NoModule, which is not a Module"):
        root._add_child("x", config_for_class(NoModule))
    message = "function with parameters `name` and `parent`.* `weft.interop.as_hierarchy` takes"
    with pytest.raises(ChildConfigError, match=message):
        root._add_child("x", config_for_function(nothing))
    assert "x" not in root.children


def test_name_conflicts_and_wrong_children():
    root, _ = make(1)
    cfg = Leaf.default_config()
    with pytest.raises(ChildNameConflictError, match="root already has a child 'leaf'"):
        root._add_child("leaf", cfg)
    with pytest.raises(ChildNameConflictError, match="root already has an attribute 'forward'"):
        root._add_child("forward", cfg)
    with pytest.raises(ChildConfigError, match="the child 'x' of root was given 3; expected"):
        root._add_child("x", 3)
    root._add_descendant("inner.new", cfg)
    assert root.inner.new.path() == "root.inner.new"
    with pytest.raises(
        InvalidDescendantError, match=r"no child 'iner', so 'iner.new' cannot .*inner"
    ):
        root._add_descendant(["iner", "new"], cfg)
    with pytest.raises(
        AttributeError, match=r"Parent 'root' has no attribute or child 'laef'.*leaf"
    ):
        _ = root.laef
    with pytest.raises(InvalidDescendantError, match=r"root is not below root.inner"):
        root.inner.path_to_descendant_module(root)


class Sharer(Parent):
    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("user", User.default_config())
        self._share_with_descendants(self.leaf, shared_module_name="shared_leaf")

    def forward(self, x):
        return self.user(x)

    def scanned(self, x):
        from weft.hierarchy.module import scan_in_context

        return scan_in_context(lambda c, _: (self.user(c), None), carry=x, xs=jnp.arange(2))[0]


class User(Module):
    def forward(self, x):
        shared = self.get_shared_module("shared_leaf")
        return shared.module(x) + 0 * shared.state["w"]

    def unknown(self):
        return self.get_shared_module("shared_lef")


def test_shared_modules_use_their_own_state():
    root = Sharer.default_config().set(name="root", deep=0).instantiate(parent=None)
    out, outputs = call(root, state_of(0), jnp.ones(1))
    np.testing.assert_allclose(out, [2])
    assert outputs.summaries == {"user": {"shared_leaf": {"mean": 1}}}
    out, outputs = call(root, state_of(0), jnp.ones(1), method="scanned")
    np.testing.assert_allclose(out, [4])
    assert outputs.summaries["iter1"]["user"]["shared_leaf"]["mean"] == 2

    with pytest.raises(InvalidDescendantError, match=r"'shared_lef' is not shared with root.user"):
        root.user.unknown()
    with pytest.raises(ChildNameConflictError, match=r"root already shares root.leaf"):
        root._share_with_descendants(root.user, shared_module_name="shared_leaf")
    other, _ = make(0)

    class Stray(Module):
        def forward(self, x):
            return other.leaf(x)

    stray = Stray.default_config().set(name="stray").instantiate(parent=None)
    with pytest.raises(
        InvalidDescendantError, match=r"root.leaf is neither below stray nor shared"
    ):
        call(stray, {}, jnp.ones(1))


def test_vlog_levels_are_inherited(caplog, capfd):
    root = Parent.default_config().set(name="root", deep=1, vlog=1).instantiate(parent=None)
    with caplog.at_level("INFO"):
        root.inner.leaf.vlog(1, "seen %d", 3)
        root.inner.leaf.vlog(2, "not seen")
    assert [r.getMessage() for r in caplog.records] == ["root.inner.leaf: seen 3"]
    jax.jit(lambda x: root.leaf.vprint(1, "x={x}", x=x))(jnp.float32(2))
    jax.effects_barrier()
    assert "root.leaf: x=2.0" in capfd.readouterr().out


def test_threads_have_their_own_stacks():
    root, state = make(1)
    results = {}

    def work(i):
        for _ in range(20):
            results[i] = call(root, state, jnp.full(1, float(i)))[0]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i in range(4):
        np.testing.assert_allclose(results[i], [8 * i])


def test_context_stack_moves_between_threads():
    class Spawning(Module):
        def forward(self):
            stack, seen = clone_context_stack(), []

            def work():
                assert current_context() is None
                install_context_stack(stack)
                seen.append(self.state["w"])

            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            return seen

    module = Spawning.default_config().set(name="s").instantiate(parent=None)
    assert call(module, {"w": 7})[0] == [7]


def test_call_runs_forward():
    class Doubling(Module):
        def forward(self, x, factor=2):
            return factor * x

    class Shifted(Doubling):
        def __call__(self, x):
            return super().__call__(x) + 1

    doubling, shifted = (
        cls.default_config().set(name="m").instantiate(parent=None) for cls in (Doubling, Shifted)
    )
    assert str(inspect.signature(doubling)) == "(x, factor=2)"
    assert (doubling(3), shifted(3)) == (6, 7)
    doubling.forward = lambda x: -x
    assert doubling(3) == -3
    with pytest.raises(AttributeError, match="no attribute or child 'forward'"):
        Module.default_config().set(name="m").instantiate(parent=None)(3)


SHOWN = """\
Parent(
  deep=1,
  leaf=Leaf(
    factor=3.0
  ),
  inner=Parent(
    deep=0,
    leaf=Leaf()
  )
)"""


def test_modules_are_shown_as_trees():
    cfg = Parent.default_config().set(name="root", deep=1)
    cfg.leaf.factor = 3.0
    parent = cfg.instantiate(parent=None)
    assert repr(parent) == SHOWN
    inner = "inner=Parent(deep=0, leaf=Leaf())"
    text = re.sub(r"\s*\n\s*", " ", treescope.render_to_text(parent))
    assert text == f"Parent( deep=1, leaf=Leaf(factor=3.0), {inner}, )"
    assert "treescope" in parent._repr_mimebundle_()["text/html"]
    text = treescope.render_to_text(parent.config)
    assert "deep=1" in text and "leaf=Config(" in text


def test_notebooks_without_treescope_show_text(monkeypatch):
    monkeypatch.setitem(sys.modules, "treescope", None)
    assert make()[0]._repr_mimebundle_() == {}


@pytest.mark.parametrize("other", [Path("model"), Leaf.default_config().set(name="leaf"), None])
def test_functional_of_what_is_no_module(other):
    with pytest.raises(ArgumentValueError, match=f"this is a {type(other).__name__};"):
        functional(other, None, {}, (), is_training=True)
