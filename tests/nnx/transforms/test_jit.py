import functools
import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.nnx.transforms.object_snapshots import is_like_plain, look, same, work
from weft import nnx
from weft.errors import (
    CallMismatchError,
    CapturedObjectError,
    InconsistentAliasError,
    TraceContextError,
    TransformArgumentError,
)


class Count(nnx.Variable):
    pass


class Model(nnx.Module):
    def __init__(self, w=1.0, **attributes):
        self.w, self.n = nnx.Param(jnp.asarray(w)), Count(jnp.array(0))
        for name, value in attributes.items():
            setattr(self, name, value)

    @nnx.jit
    def __call__(self, x):
        self.n[...] += 1
        return self.w * x

    @nnx.jit(static_argnames="power")
    def scaled(self, x, *, power=1):
        return self.w * x**power

    @staticmethod
    @nnx.jit
    def total(model, x):
        return model.w + x

    @classmethod
    def made(cls, w):
        return nnx.jit(cls)(w)


def traced(fn):
    """Returns a function, and a list that has an entry for each of its traces."""
    traces = []

    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        traces.append(None)
        return fn(*args, **kwargs)

    return wrapper, traces


def test_captured_models_are_read_only():
    model = Model(2.0)
    assert nnx.jit(lambda x: model.w * x)(3.0) == 6

    @nnx.jit
    def write(x):
        model.w[...] = x

    @nnx.jit
    def attach(other):
        other.part = model

    with pytest.raises(TraceContextError, match=r"is changed inside of nnx.jit\(write\)"):
        write(1.0)
    with pytest.raises(CapturedObjectError, match=r"nnx\.jit"):
        attach(Model())
    with pytest.raises(CapturedObjectError, match=r"nnx\.jit"):
        nnx.jit(lambda x: model)(1.0)
    assert model.w[...] == 2


def test_objects_are_not_static():
    f, model = nnx.jit(lambda model, k: model.w, static_argnums=1, static_argnames="k"), Model()
    f(model, 1)
    text = "a Model was passed for an argument that is static by static_argnums or static_argnames"
    for call in (lambda: f(model, model), lambda: f(model, k=Model())):
        with pytest.raises(TransformArgumentError, match=text):
            call()


def test_donated_and_shared():
    f = nnx.jit(work, donate_argnums=0)
    a, b = Model(jnp.ones(3)), Model(jnp.full(3, 2.0))
    b.part = a
    a.alias = a.w
    for args in [(a,), (a, a), (a, b), (b, a), ([a, b],), (b, 1.0)]:
        is_like_plain(f, *args)
        is_like_plain(f, *args)


def test_donated_with_a_changed_structure():
    @nnx.jit(donate_argnums=0)
    def f(model):
        model.k = model.k + 1
        model.new = nnx.Param(model.w * 2)

    model = Model(jnp.ones(3), k=0)
    for i in range(3):
        f(model)
        assert model.k == i + 1 and model.w[...].tolist() == [1, 1, 1]
        assert model.new[...].tolist() == [2, 2, 2]


def test_error_while_tracing_donates_nothing():
    @nnx.jit(donate_argnums=0)
    def f(model):
        model.w[...] = model.w * 2
        raise KeyError("no")

    model = Model(jnp.ones(3))
    with pytest.raises(KeyError):
        f(model)
    assert model.w[...].tolist() == [1, 1, 1]


def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))


def test_conflicting_shardings_of_one_object_fail():
    x, whole = NamedSharding(mesh(), PartitionSpec("x")), NamedSharding(mesh(), PartitionSpec())
    f = nnx.jit(lambda first, *rest, last=None: None, in_shardings=(x, whole))
    model = Model(jnp.arange(8.0))
    said = r"nnx\.jit\(<lambda>\): .* to first\.n, and .* to args\[1\]\.n\. .*=\(x, whole\)"
    with pytest.raises(InconsistentAliasError, match=said):
        f(model, model)
    with pytest.raises(InconsistentAliasError, match=r"to first\.n, and .* to last\.n"):
        f(model, Model(), last=model)


def test_one_sharding_for_any_number_of_arguments():
    whole = NamedSharding(mesh(), PartitionSpec())
    for given in (whole, None):
        f = nnx.jit(lambda m, x=1.0, y=2.0: m.w * x * y, in_shardings=given)
        for args in [(), (3.0,), (3.0, 4.0), (), (5.0, 6.0)]:
            assert f(Model(), *args) == np.prod([*args, *(1.0, 2.0)[len(args) :]])


def test_shardings_hold_when_structure_changes():
    x = NamedSharding(mesh(), PartitionSpec("x"))

    @nnx.jit(in_shardings=x, donate_argnums=0)
    def f(model):
        model.part = nnx.Param(model[0] * 2)

    model = nnx.List([nnx.Param(jnp.arange(8.0)), nnx.Param(jnp.zeros(8))])
    f(model)
    f(model)
    assert model.part[...].tolist() == list(range(0, 16, 2))
    assert all(v[...].sharding.is_equivalent_to(x, 1) for v in model)


def test_only_structure_changes_retrace():
    fn, traces = traced(lambda m, x: m.w * x)
    f, model = nnx.jit(fn), Model(k=1)
    for i in range(3):
        model.w[...] = i
        f(model, 1.0)
    assert len(traces) == 1
    for k in (2, 1, 2, 1):
        model.k = k
        f(model, 1.0)
    assert len(traces) == 2
    f(model, x=1.0)
    f(model, x=1.0)
    assert len(traces) == 3


def test_counters_of_any_kind_are_traced_once():
    for first in (0, 0.0, jnp.array(0), jnp.array(0.0), jnp.zeros(()), jnp.uint32(0)):

        @traced
        def count(m):
            m.n[...] += 1

        fn, traces = count
        f, model = nnx.jit(fn), nnx.Dict(n=nnx.Variable(first))
        for i in range(3):
            f(model)
            assert model.n[...] == i + 1
        # A number of Python is an array afterwards, which JAX takes for the same.
        assert len(traces) == 1


def is_gone(make):
    ref = make()
    gc.collect()
    return ref() is None


def test_no_model_is_kept():
    f = nnx.jit(work)

    @nnx.jit
    def grow(m):
        m.k = nnx.Param(m.w * 2)
        m.w.set_metadata(tag="t")

    def run(*calls):
        model = Model(jnp.ones(3))
        for call in calls:
            call(model)
        return weakref.ref(model)

    assert is_gone(lambda: run(f, f))
    assert is_gone(lambda: run(lambda m: f(m, x=m), lambda m: f([m]), lambda m: f(m, 1.0)))
    assert is_gone(lambda: run(grow, grow, f))
    assert is_gone(lambda: run(lambda m: setattr(m, "me", m), f, f))

    def broken(m):
        with pytest.raises(TypeError):
            f(m, "text")

    assert is_gone(lambda: run(f, broken))

    def captured():
        model = Model()
        nnx.jit(lambda x: model.w * x)(1.0)
        return weakref.ref(model)

    assert is_gone(captured)
    assert not f._cached_calls and f._last is None


def test_replaced_variables_are_released():
    f, model = nnx.jit(lambda m: m.w * 2), Model(jnp.ones(3))
    f(model)
    array = weakref.ref(model.w)
    model.w = nnx.Param(jnp.ones(3))
    gc.collect()
    assert array() is None


def test_no_tracer_is_kept():
    @nnx.jit
    def inner(m, x):
        m.n[...] += 1
        m.me = m
        return m.w * x

    @nnx.jit
    def outer(m, x):
        other = Model(x)
        return inner(m, x) + inner(other, x) + inner(other, x)

    model = Model()
    with jax.checking_leaks():
        outer(model, 2.0)
        outer(model, 2.0)
        jax.jit(lambda x: inner(Model(x), x))(1.0)
        jax.vmap(lambda x: inner(Model(x), x))(jnp.ones(2))
        jax.grad(lambda x: inner(Model(x), x))(1.0)
    assert model.n[...] == 2


def test_cache_is_bounded():
    from weft.nnx.transforms import jit as module

    f, models = nnx.jit(lambda m: m.w * 1), [Model(float(i)) for i in range(100)]
    for _ in range(2):
        assert [f(m).item() for m in models] == list(range(100))
    assert len(f._cached_calls) <= module._MAX_CACHED_CALLS

    g, model = nnx.jit(lambda x, m: x, static_argnums=0), Model()
    bound, module._MAX_PROGRAMS = module._MAX_PROGRAMS, 5
    try:
        h = nnx.jit(lambda m: m.k)
        for i in range(12):
            model.k = i
            assert h(model) == i
        assert len(h._programs) == 5
    finally:
        module._MAX_PROGRAMS = bound
    assert g(1, model) == 1
    h.clear_cache()
    assert not h._programs and not h._cached_calls and h(model) == 11


def test_host_callback_that_changes_the_model():
    model = Model(1.0, k=0)

    def change():
        model.k += 1

    @nnx.jit
    def f(m):
        jax.debug.callback(change)
        m.n[...] += 1
        return m.w + m.k

    for i in range(3):
        f(model).block_until_ready()
        jax.effects_barrier()
        assert model.k == i + 1 and model.n[...] == i + 1


def test_two_threads_trace_one_program():
    fn, traces = traced(lambda m: m.w * 1)
    f, results = nnx.jit(fn), []
    f(Model())
    threads = [
        threading.Thread(target=lambda: results.extend(f(Model(float(i))).item() for i in range(9)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == sorted([*range(9)] * 3) and len(traces) == 1


def test_partials_of_jitted_functions():
    @nnx.jit
    def f(m, n, x):
        m.n[...] += 1
        return m.w * n.w * x

    m, n = Model(2.0), Model(3.0)
    g = nnx.cached_partial(f, m, n)
    assert g(1.0) == 6 and g(x=2.0) == 12 and m.n[...] == 2
    m.w = nnx.Param(jnp.float32(5.0))
    n.k = 1
    assert g(1.0) == 15 and m.n[...] == 3
    h = nnx.jit_partial(lambda m, x: m.w * x, m, graph=False)
    assert h(2.0) == 10
    m.w = nnx.Param(jnp.float32(1.0))
    assert h(2.0) == 2


def test_reads_in_tree_mode():
    f, model = nnx.jit(look, graph=False), Model(1.0, k=1)
    for value in (1.0, 2.0):
        model.w[...] = value
        same(f(model), look(model))
        same(f([model]), look([model]))
    model.k = 2
    same(f(model), look(model))


NAMES = ["donated_state", "state", "donated", "kept", "rest", "named", "self", "static", "args"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("option", ["static", "donate"])
def test_arguments_may_have_any_name(name, option):
    made: dict = {}
    exec(f"def f(model, {name}):\n    return model.w[...] * {name}", made)
    given = {"static": 3.0, "donate": jnp.array(3.0)}[option]
    for how in ({f"{option}_argnames": name}, {f"{option}_argnums": 1}):
        f, model = nnx.jit(made["f"], **how), Model(jnp.array(2.0))
        assert f(model, given * 1) == 6 and f(model, **{name: given * 1}) == 6
        assert f(**{"model": model, name: given * 1}) == 6
        assert f.lower(model, **{name: given * 1}).as_text()
    exec(f"def g({name}, *, x):\n    return {name}.w[...] * x", made)
    g = nnx.jit(made["g"], donate_argnames=name)
    assert g(Model(jnp.array(2.0)), x=3.0) == g(**{name: Model(jnp.array(2.0)), "x": 3.0}) == 6


def test_compiled_code_uses_user_names():
    @nnx.jit
    def train_step(model, batch, *, scale):
        return (model.w * batch["x"] * scale).sum()

    batch = {"x": jnp.ones(3)}
    text = train_step.lower(Model(jnp.ones(3)), batch, scale=2.0).as_text(debug_info=True)
    assert "jit_train_step" in text and "jit(train_step)" in text
    assert "batch['x']" in text and "scale" in text
    assert "rest[" not in text and "jit(pure)" not in text


def shown_names(traced):
    """Returns the names of arguments in the jaxpr; the text of the lowered program has them all."""
    names, text = traced.jaxpr.jaxpr.debug_info.arg_names, traced.lower().as_text(debug_info=True)
    assert all(f'loc("{name}")' in text for name in names)
    return names


MODES = [{}, {"graph_updates": False}, {"graph": False}]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_values_of_objects_are_named_by_their_paths(mode):
    def f(first, x, second, /, *more, by_name, **others):
        every = jax.tree.leaves(((first, second, more, by_name, others), x))
        return sum(leaf.sum() for leaf in every)

    first = Model(jnp.ones(2), sub=nnx.Dict({"a b": nnx.Param(jnp.ones(2))}))
    second = nnx.List([nnx.Param(jnp.ones(2)), {"d": jnp.ones(2)}])
    call = first, {"x": jnp.ones(2)}, second, jnp.ones(2), Model(1.0)
    named = {"by_name": [nnx.Param(1.0), 2.0], "other": Model(1.0), "v": nnx.Param(1.0)}
    names = shown_names(nnx.jit(f, **mode).trace(*call, **named))
    assert set(names) == {
        *("first.n", "first.sub['a b']", "first.w", "second[0]", "second[1].d", "x['x']"),
        *("more[0]", "more[1].n", "more[1].w", "by_name[0]", "by_name[1]"),
        *("others['other'].n", "others['other'].w", "others['v']"),
    }


@pytest.mark.parametrize("donate", [{}, {"donate_argnums": 1}])
def test_shared_value_has_the_name_of_its_first_place(donate):
    w = nnx.Param(jnp.ones(2))
    a, b = nnx.Dict(v=nnx.Param(jnp.ones(3)), w=w), nnx.Dict(w=w, z=nnx.Param(jnp.ones(4)))
    f = nnx.jit(lambda a, b, w: a.v.sum() + b.w.sum() + b.z.sum() + w.sum(), **donate)
    traced = f.trace(a, b, w)
    of_shape = zip(shown_names(traced), (x.shape for x in traced.jaxpr.in_avals), strict=True)
    assert {*of_shape} == {("a.v", (3,)), ("a.w", (2,)), ("b.z", (4,))}


def test_errors_of_jax_name_the_values_of_objects():
    f = nnx.jit(lambda model, x: model.sub.w.sum() + x.sum())
    one, other = (jax.device_put(jnp.ones(2), device) for device in jax.devices()[:2])
    model = nnx.Dict(sub=nnx.Dict(w=nnx.Param(one)))
    with pytest.raises(ValueError, match=r"argument model\.sub\.w of test_errors"):
        f(model, other)
    w = nnx.Param(one)
    with pytest.raises(ValueError, match=r"argument w of test_errors"):
        nnx.jit(lambda x, w: x + w)(other, w)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"static_argnums": 3},
            r"jit\(f\): static_argnums has 3, and the function takes 2 arg",
        ),
        ({"donate_argnums": -3}, "donate_argnums has -3"),
        (
            {"donate_argnames": "z"},
            "donate_argnames has 'z', but the function has the parameters m",
        ),
    ],
)
def test_unknown_arguments(options, words):
    def f(m, x):
        return x

    with pytest.raises(TransformArgumentError, match=words):
        nnx.jit(f, **options)


def test_shardings_argument_mismatch():
    f = nnx.jit(lambda m, x=0: m, in_shardings=(None,))
    with pytest.raises(CallMismatchError, match="in_shardings has 1 entries, but the call has 2"):
        f(Model(), 1.0)


def test_in_other_transformations():
    @nnx.jit
    def f(m, x):
        m.n[...] += 1
        return m.w * x

    model = Model(2.0)
    assert nnx.jit(lambda m, x: f(m, x) + f(m, x))(model, 3.0) == 12 and model.n[...] == 2
    grads = nnx.grad(lambda m, x: f(m, x))(model, 3.0)
    assert grads["w"][...] == 3 and model.n[...] == 3
    models = Model(jnp.arange(3.0))
    models.n.set_value(jnp.zeros(3, int))
    assert nnx.vmap(f)(models, jnp.ones(3)).tolist() == [0, 1, 2]
    assert models.n[...].tolist() == [1, 1, 1]

    def body(m, x):
        return m, f(m, x)

    _, ys = nnx.scan(body)(model, jnp.arange(3.0))
    assert ys.tolist() == [0, 2, 4] and model.n[...] == 6
    assert nnx.remat(f)(model, 1.0) == 2 and model.n[...] == 7
    assert nnx.cond(True, f, lambda m, x: x, model, 1.0) == 2 and model.n[...] == 8
    with pytest.raises(TraceContextError):
        jax.jit(lambda x: f(model, x))(1.0)
    assert jax.jit(lambda x: nnx.jit(lambda m: m.w * x)(model))(1.0) == 2


def test_abstract_results():
    f, model = nnx.jit(lambda m, x: m(x)), Model(jnp.ones(3))
    assert f.eval_shape(model, 1.0).shape == (3,) and model.n[...] == 0
