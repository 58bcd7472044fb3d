"""Public functions and classes with arguments of the wrong kind, rank, dtype or place.

What they raise is not checked here, only that no exception comes from inside of a message: from the
expression of a `raise` statement, or from a function that makes an error.
"""

import ast
import contextlib
import functools
import io
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import weft
from weft import core, functional, hierarchy, lifting, metrics, nnx, struct, traverse_util
from weft import linen as nn
from weft.errors import WeftError

MODULES = (functional, nnx, nn, hierarchy, core, lifting, metrics, struct, traverse_util)
# They change settings of the process, or wait.
EXCLUDED = ("install_", "set_", "use_", "register", "enable", "disable", "with_", "var_defaults")
SOURCE = Path(weft.__file__).parent


def public_names() -> list[str]:
    """Returns the callables of the public tables, such as "nnx.Linear"."""
    found = []
    for module in MODULES:
        for name in sorted(dir(module)):
            is_public = not name.startswith("_") and not name.startswith(EXCLUDED)
            value = getattr(module, name)
            is_ours = getattr(value, "__module__", "").startswith("weft")
            if is_public and is_ours and callable(value):
                found.append(f"{module.__name__.removeprefix('weft.')}.{name}")
    return found


VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "-1": lambda: -1,
    "2.5": lambda: 2.5,
    "'x'": lambda: "x",
    "vector": lambda: jnp.ones(3),
    "matrix": lambda: jnp.ones((2, 3)),
    "integers": lambda: jnp.arange(6).reshape(2, 3),
    "complex": lambda: jnp.ones(3, complex),
    "empty": lambda: jnp.ones((0, 3)),
    "keys": lambda: jax.random.key(0),
    "texts": lambda: np.array(["a", "b"]),
    "shape": lambda: jax.ShapeDtypeStruct((2, 3), jnp.float32),
    "function": lambda: lambda x: x,
    "class": lambda: nn.Dense,
    "dict": lambda: {"a": jnp.ones(2), "b": {}},
    "list": lambda: [1, "x"],
    "tuple": lambda: (2, 3),
    "object": object,
    "module of nnx": lambda: nnx.Sequential(nnx.Dropout(0.5, rngs=nnx.Rngs(0))),
    "variable": lambda: nnx.Param(jnp.ones(3)),
    "rngs": lambda: nnx.Rngs(0),
    "module of linen": lambda: nn.Dense(3),
    "config": lambda: hierarchy.Linear.default_config(),
    "layer": lambda: hierarchy.Dropout.default_config().set(name="x").instantiate(parent=None),
}
TRANSFORMATIONS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "none": lambda f: f,
    "jit": jax.jit,
    "vmap": jax.vmap,
    "grad": jax.grad,
}

CASES = st.tuples(
    st.sampled_from(public_names()),
    st.sampled_from([*TRANSFORMATIONS]),
    st.lists(st.sampled_from([*VALUES]), max_size=4),
    st.booleans(),
)
SHORT = 150


def check(case: tuple[str, str, list[str], bool]) -> None:
    name, transformation, arguments, calls_result = case
    module, attribute = name.split(".")
    fn = getattr({m.__name__.removeprefix("weft."): m for m in MODULES}[module], attribute)
    values = [VALUES[argument]() for argument in arguments]

    def run(x: Any) -> Any:
        # Inside of the transformation, arrays are of its trace.
        result = fn(*(x if type(v) is type(x) and i == 0 else v for i, v in enumerate(values)))
        if calls_result and callable(result):
            result = result(x)
        repr(result)
        return result

    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            TRANSFORMATIONS[transformation](run)(jnp.ones(3))
    except Exception as error:
        where = in_message(error)
        assert where is None, f"{type(error).__name__} from inside of a message, {where}: {error}"


def in_message(error: BaseException | None) -> str | None:
    """Returns the line of Weft that made a message when the exception was raised, or None."""
    while error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f for f in frames if SOURCE in Path(f.filename).parents]
        if not isinstance(error, WeftError):
            for frame in ours:
                is_last = frame is frames[-1]
                if _makes_error(frame.name) or _is_in_raise(frame, type(error), is_last):
                    return f"{Path(frame.filename).relative_to(SOURCE)}:{frame.lineno}"
        error = error.__context__
    return None


def _makes_error(function: str) -> bool:
    is_loss = any(hasattr(module, function) for module in MODULES)
    return function.endswith("_error") and not is_loss


def _is_in_raise(frame: traceback.FrameSummary, error: type, is_last: bool) -> bool:
    for first, last, text in _raises(frame.filename):
        if first <= (frame.lineno or 0) <= last:
            # The statement itself may raise an error that is not Weft's.
            return not (is_last and (error.__name__ in text or "(" not in text))
    return False


@functools.cache
def _raises(filename: str) -> list[tuple[int, int, str]]:
    """Returns the first and last line, and the text, of the `raise` statements of a file."""
    tree = ast.parse(Path(filename).read_text(encoding="utf-8"))
    statements = (node for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc)
    return [(n.lineno, n.end_lineno or n.lineno, ast.unparse(n)) for n in statements]


def source(case: tuple[str, str, list[str], bool]) -> str:
    return f"from tests.fuzz.fuzz_errors import check\n\ncheck({case!r})\n"
