"""Public classes, methods and functions with arguments of the wrong kind, rank, dtype or place.

What they raise is not checked here, only that it was raised on purpose or by JAX or Python for the
user: no exception comes from inside of a message, and none tells of Weft's own names.
"""

import contextlib
import functools
import io
import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.fuzz import error_messages
from tests.fuzz.entry_points import entry_point, names, write_files
from weft import core, hierarchy, nnx
from weft import linen as nn


def _sharded(axis_type: AxisType) -> jax.Array:
    mesh = jax.make_mesh((min(2, jax.device_count()),), ("data",), (axis_type,))
    return jax.device_put(jnp.ones((2, 4)), NamedSharding(mesh, P("data")))


def _deleted() -> jax.Array:
    x = jnp.ones((2, 3))
    x.delete()
    return x


def _leaked() -> jax.Array:
    """Returns a tracer of a transformation that has ended."""
    found = []
    jax.jit(lambda x: found.append(x))(jnp.ones((2, 3)))
    return found[0]


def _nnx_model() -> nnx.Module:
    return nnx.Sequential(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0)))


def _layer() -> hierarchy.Module:
    return hierarchy.Dropout.default_config().set(name="x", rate=0.5).instantiate(parent=None)


class _Strange:
    """A value whose attributes, length and truth cannot be asked for."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def __len__(self) -> int:
        raise TypeError("has no length")


VALUES: dict[str, Callable[[], Any]] = {
    # Kinds.
    "None": lambda: None,
    "True": lambda: True,
    "-1": lambda: -1,
    "0": lambda: 0,
    "10**30": lambda: 10**30,
    "2.5": lambda: 2.5,
    "nan": lambda: math.nan,
    "'x'": lambda: "x",
    "''": lambda: "",
    "b'x'": lambda: b"\xffx",
    "path": lambda: Path("file"),
    "folder": lambda: Path("."),
    "function": lambda: lambda x: x,
    "partial": lambda: functools.partial(lambda x, y: x, y=1),
    "class": lambda: dict,
    "package": lambda: math,
    "dict": lambda: {"a": jnp.ones(2), "b": {}},
    "dict of keys of two kinds": lambda: {1: jnp.ones(2), "b": 2, None: 3},
    "list": lambda: [1, "x"],
    "empty list": list,
    "tuple": lambda: (2, 3),
    "set": lambda: {1, "x"},
    "generator": lambda: iter([1]),
    "object": object,
    "strange": _Strange,
    "exception": lambda: ValueError("x"),
    "dtype": lambda: jnp.bfloat16,
    "spec": lambda: P("data", None),
    "mesh": lambda: jax.make_mesh((1,), ("data",)),
    "optax": lambda: optax.sgd(0.1),
    "module of nnx": _nnx_model,
    "class of nnx": lambda: nnx.Linear,
    "variable": lambda: nnx.Param(jnp.ones(3)),
    "class of variables": lambda: nnx.Param,
    "rngs": lambda: nnx.Rngs(0),
    "state": lambda: nnx.state(_nnx_model()),
    "graphdef": lambda: nnx.graphdef(_nnx_model()),
    "module of linen": lambda: nn.Dense(3),
    "class of linen": lambda: nn.Dense,
    "bound module": lambda: nn.Dense(3).bind({"params": {}}),
    "scope": lambda: core.Scope({}, {"params": jax.random.key(0)}, mutable=["params"]),
    "metadata": lambda: nn.Partitioned(jnp.ones(3), ("data",)),
    "config": lambda: hierarchy.Linear.default_config(),
    "class of hierarchy": lambda: hierarchy.Linear,
    "layer": _layer,
    # Models that are transformed without their state.
    "jit of nnx": lambda: jax.jit(_nnx_model()),
    "vmap of nnx": lambda: jax.vmap(_nnx_model()),
    "nnx.jit": lambda: nnx.jit(_nnx_model()),
    "jit of linen": lambda: jax.jit(nn.Dense(3)),
    "vmap of layer": lambda: jax.vmap(_layer()),
    # Ranks.
    "scalar": lambda: jnp.ones(()),
    "vector": lambda: jnp.ones(3),
    "matrix": lambda: jnp.ones((2, 3)),
    "rank 5": lambda: jnp.ones((1, 2, 1, 2, 1)),
    "empty": lambda: jnp.ones((0, 3)),
    # Dtypes.
    "integers": lambda: jnp.arange(6).reshape(2, 3),
    "bools": lambda: jnp.ones((2, 3), bool),
    "complex": lambda: jnp.ones(3, complex),
    "float8": lambda: jnp.ones((2, 3), jnp.float8_e4m3fn),
    "int4": lambda: jnp.ones((2, 3), jnp.int4),
    "keys": lambda: jax.random.key(0),
    "many keys": lambda: jax.random.split(jax.random.key(0), (2, 3)),
    "raw key": lambda: jax.random.PRNGKey(0),
    "texts": lambda: np.array(["a", "b"]),
    "objects": lambda: np.array([None, "b"], object),
    "dates": lambda: np.array(["2000-01-01"], "datetime64[D]"),
    "records": lambda: np.zeros(2, [("a", int), ("b", float)]),
    # Places.
    "of NumPy": lambda: np.ones((2, 3), np.float32),
    "view": lambda: np.ones((4, 6), ml_dtypes.bfloat16)[::-2, ::2],
    "big-endian": lambda: np.ones((2, 3), ">f4"),
    "on another device": lambda: jax.device_put(jnp.ones((2, 3)), jax.devices()[-1]),
    "sharded": lambda: _sharded(AxisType.Auto),
    "sharded explicitly": lambda: _sharded(AxisType.Explicit),
    "shape": lambda: jax.ShapeDtypeStruct((2, 3), jnp.float32),
    "deleted": _deleted,
    "leaked": _leaked,
    "tracer": lambda: TRACED,
}
TRACED = object()  # replaced by what a transformation passes


def _in_linen(fn: Callable[..., Any], x: Any) -> Any:
    class Caller(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return fn(x)

    return Caller().init_with_output(jax.random.key(0), x)


def _in_hierarchy(fn: Callable[..., Any], x: Any) -> Any:
    class Caller(hierarchy.BaseLayer):
        def forward(self, x: Any) -> Any:
            return fn(x)

    layer = Caller.default_config().set(name="caller").instantiate(parent=None)
    return hierarchy.functional(layer, jax.random.key(0), {}, (x,), is_training=True)


TRANSFORMATIONS: dict[str, Callable[[Callable[..., Any], Any], Any]] = {
    "eval_shape": jax.eval_shape,
    "none": lambda fn, x: fn(x),
    "jit": lambda fn, x: jax.jit(fn)(x),
    "vmap": lambda fn, x: jax.vmap(fn)(x),
    "grad": lambda fn, x: jax.grad(fn)(x),
    "scan": lambda fn, x: jax.lax.scan(lambda c, x: (c, fn(x)), 0, x),
    "nnx.jit": lambda fn, x: nnx.jit(fn)(x),
    "nnx.vmap": lambda fn, x: nnx.vmap(fn)(x),
    "nnx.grad": lambda fn, x: nnx.grad(fn)(x),
    "in linen": _in_linen,
    "in hierarchy": _in_hierarchy,
}

# Entry point, transformation, wrong arguments by the number of their parameters, by keyword, in the
# context that a layer needs.
Case = tuple[str, str, dict[int, str], bool, bool]
CASES: st.SearchStrategy[Case] = st.tuples(
    st.sampled_from(names()),
    # Nothing is compiled in the first, so it takes the least time.
    st.sampled_from([*8 * ["eval_shape"], *TRANSFORMATIONS, "none", "none"]),
    st.dictionaries(st.integers(0, 15), st.sampled_from([*VALUES]), max_size=3),
    st.booleans(),
    st.booleans(),
)
SHORT = 50


def check(case: Case) -> None:
    with _elsewhere():
        try:
            _call(*case)
        except (Exception, SystemExit) as error:
            found = error_messages.fault(error)
            assert found is None, found


def _call(
    name: str, transformation: str, wrong: dict[int, str], by_keyword: bool, in_context: bool
) -> None:
    values = {i: VALUES[value]() for i, value in wrong.items()}

    def run(x: Any) -> jax.Array:
        # Inside, as nothing is compiled where arrays are traced.
        entry = entry_point(name, in_context=in_context)
        # What does not exist comes last.
        parameters = [*entry.parameters, "no_parameter"]
        given = {}
        for i, value in values.items():
            given[parameters[i % len(parameters)]] = x if value is TRACED else value
        result = entry.call(given, by_keyword=by_keyword)
        repr(result)
        if callable(result):
            repr(result(x))
        return jnp.sum(x)

    TRANSFORMATIONS[transformation](run, jnp.ones((2, 3)))


class _Formatter(logging.Handler):
    """Makes the text of what is logged, as a handler would; errors are raised."""

    def emit(self, record: logging.LogRecord) -> None:
        record.getMessage()


@contextlib.contextmanager
def _elsewhere() -> Iterator[None]:
    """Gives a case an empty folder, and nothing to read or to print on."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(contextlib.chdir(folder))
        write_files(Path(folder))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        log = logging.getLogger("weft")
        handlers, propagates = log.handlers, log.propagate
        log.handlers, log.propagate = [_Formatter()], False
        try:
            yield
        finally:
            log.handlers, log.propagate = handlers, propagates


def source(case: Case) -> str:
    return f"from tests.fuzz.fuzz_errors import check\n\ncheck({case!r})\n"
