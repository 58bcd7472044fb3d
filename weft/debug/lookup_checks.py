"""Checks that what a model looks up in its tables has rows there.

JAX does not fail at a row that a table lacks: the result is NaN, or the last row. A mistake would
therefore train a wrong model.

`check_tokens` looks at the configs alone, before anything is built. It finds the fields by name:

    vocab_size                     in a model of any library: the number of rows
    pad_token_id, eos_token_id     next to it: the ids that the model pads and ends texts with
    tokenizer, sequence_length     in an input or evaler

`check_lookups` looks at the first batch and the program of the step. A table can be a layer of any
library or a plain `table[ids]`, and all of them are a `gather` from a parameter. Its indices are
computed here from the batch, with NumPy, for those lookups whose indices follow from integers of
the batch and from shapes alone. Nothing is compiled.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from weft.config import ConfigBase
from weft.errors import InputDatasetError, TokenizerError
from weft.hierarchy import LearnedPositionalEmbedding
from weft.input.tokenizers import Tokenizer, as_tokenizer
from weft.lifting.state_creation import consts_and_carry
from weft.trainer import run_dir, train_step
from weft.trainer.optimizers.base import leaves_by_path, path_name
from weft.trainer.trainer_config_modifier import find_values
from weft.typing import NestedTensor

if TYPE_CHECKING:  # slow to import
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

_SPECIAL = {"pad_token_id": "pad_id", "eos_token_id": "eos_id"}
_ITERATIONS = 64
"""Number of iterations of a loop that are looked at, such as microbatches."""


def check_tokens(cfg: ConfigBase) -> None:
    """Checks a trainer's config; loads its tokenizers.

    Raises:
        TokenizerError: if a tokenizer has more ids than the model, if they pad or end texts with
            different ids, if such an id is outside of the vocabulary, or if an evaler has another
            tokenizer than the training, or begins texts in another way.
        InputDatasetError: if a sequence is longer than the model's table of positions.
    """
    fields = run_dir.find_fields("tokenizer", cfg)
    own_first = sorted(fields, key=lambda path: not path.startswith("input."))
    begins = run_dir.find_fields("add_bos", cfg)
    tokenizers = {
        path: as_tokenizer(
            fields[path], add_bos=begins.get(f"{path.removesuffix('tokenizer')}add_bos", False)
        )
        for path in own_first
    }
    sizes = run_dir.find_fields("vocab_size", cfg.model)
    vocabularies = {path: size for path, size in sizes.items() if isinstance(size, int)}
    if vocabularies:
        # If there are several, those of text are the larger ones.
        field = max(vocabularies, key=lambda path: vocabularies[path])
        special = _special_ids(cfg.model, field)
        _check_special(field, vocabularies[field], special)
        for path, tokenizer in tokenizers.items():
            _check_vocabulary(path, tokenizer, field, vocabularies[field], special)
    _check_equal(tokenizers)
    _check_lengths(cfg)


def _special_ids(model: Any, field: str) -> Mapping[str, tuple[int, ...]]:
    """Returns the model's special ids by path; a negative one is that of no token."""
    parent = field.rpartition(".")[0]
    owner = model.get_recursively(parent) if parent else model
    values = {name: getattr(owner, name, None) for name in _SPECIAL}
    found = {name: (value,) if isinstance(value, int) else value for name, value in values.items()}
    return {
        f"{parent}.{name}".lstrip("."): tuple(ids)
        for name, ids in found.items()
        if isinstance(ids, Sequence) and ids
    }


def _check_special(field: str, size: int, special: Mapping[str, tuple[int, ...]]) -> None:
    for path, ids in special.items():
        value = max(ids)
        if value >= size:
            raise TokenizerError(
                f"model.{path}={value} is outside of the vocabulary, model.{field}={size}: its ids "
                f"are 0 to {size - 1}. Set model.{field}={value + 1} or another id."
            )


def _check_vocabulary(
    path: str, tokenizer: Tokenizer, field: str, size: int, special: Mapping[str, tuple[int, ...]]
) -> None:
    wrong, needed = [], []
    if tokenizer.vocab_size > size:
        wrong.append(f"it has {tokenizer.vocab_size} ids, and model.{field}={size}")
        needed.append(f"model.{field}={tokenizer.vocab_size}")
    for name, ids in special.items():
        own_name = _SPECIAL[name.rpartition(".")[2]]
        own = getattr(tokenizer, own_name)
        if own not in ids:
            value = ids[0] if len(ids) == 1 else ids
            wrong.append(f"its {own_name} is {own}, and model.{name}={value}")
            needed.append(f"model.{name}={own}")
    if wrong:
        raise TokenizerError(
            f"the tokenizer of {path} does not fit the model: {'; '.join(wrong)}. Set "
            f"{' '.join(needed)}, or choose the model's own tokenizer."
        )


def _check_equal(tokenizers: Mapping[str, Tokenizer]) -> None:
    """Compares evalers' tokenizers with that of the same field of the input."""
    for path, tokenizer in tokenizers.items():
        trained = path[path.find("].") + 2 :]
        of_training = tokenizers.get(trained, tokenizer)
        if _identity(tokenizer) != _identity(of_training):
            raise TokenizerError(
                f"the tokenizers differ: {trained} is {of_training!r}, and {path} is "
                f"{tokenizer!r}. A model understands the ids of one of them; set the same "
                "`tokenizer` and `add_bos` for both."
            )


def _identity(tokenizer: Tokenizer) -> object:
    return getattr(tokenizer, "fingerprint", type(tokenizer))


def _check_lengths(cfg: ConfigBase) -> None:
    tables = find_values(cfg.model, lambda _, x: isinstance(x, LearnedPositionalEmbedding.Config))
    if not tables:
        return
    field, table = max(tables.items(), key=lambda item: item[1].shape[0])
    for path, length in run_dir.find_fields("sequence_length", cfg).items():
        if isinstance(length, int) and length > table.shape[0] and not path.startswith("model."):
            raise InputDatasetError(
                f"{path}={length} is longer than the model's table of positions, "
                f"model.{field}.shape={tuple(table.shape)}. Set {path}={table.shape[0]}, or "
                f"model.{field}.shape={length},"
            )


def check_lookups(
    program: "ClosedJaxpr", state: train_step.TrainerState, batch: NestedTensor, cfg: ConfigBase
) -> None:
    """Checks the lookups of a step in parameters.

    Args:
        program: the step; its arguments begin with the state and end with the batch.
        state, batch: arrays or their shapes; without values, positions alone are checked.
        cfg: the trainer's config. All ids of its tokenizers are checked, for the field `input_ids`.

    Raises:
        InputDatasetError: if the batch has an id, or the model a position, without a row.
        TokenizerError: if a tokenizer has.
    """
    paths, fields = leaves_by_path(state), leaves_by_path(batch)
    num_other = len(program.jaxpr.invars) - len(paths) - len(fields)
    tables = [path_name(p[1:]) if p[0].name == "model" else None for p in paths]
    arguments = [_Known(table=table) for table in tables] + [_Known()] * num_other
    shapes = {path_name(path): x for path, x in fields.items()}
    values = {name: _integers(x) for name, x in shapes.items()}

    def first_wrong(values: Mapping[str, np.ndarray | None]) -> "_Lookup | None":
        given = [_Known(x, frozenset([name])) for name, x in values.items()]
        frame = _Frame(program.jaxpr, [*arguments, *given], program.consts)
        return next((x for x in frame.lookups() if x.is_wrong()), None)

    lookup = first_wrong(values)
    if lookup is not None:
        raise InputDatasetError(_text(lookup, values, batch, cfg))
    for path, tokenizer in run_dir.find_fields("tokenizer", cfg.input).items():
        size = as_tokenizer(tokenizer).vocab_size
        ids = {n: np.full(x.shape, size - 1) for n, x in shapes.items() if n == "input_ids"}
        lookup = first_wrong({**values, **ids})
        if lookup is not None:
            raise TokenizerError(
                f"the tokenizer of input.{path} does not fit the model: it has {size} ids, and the "
                f"model looks them up in {lookup}. Give the table {size} rows, or choose the "
                "model's own tokenizer."
            )


def _text(
    lookup: "_Lookup", values: Mapping[str, np.ndarray | None], batch: NestedTensor, cfg: ConfigBase
) -> str:
    names = sorted(lookup.indices.fields)
    if names:
        found = [(name, values[name]) for name in names]
        ranges = [f"{name} from {x.min()} to {x.max()}" for name, x in found if x is not None]
        return (
            f"the batch has ids in {', '.join(ranges)}, and the model looks them up in {lookup}. "
            f"Give the table more rows, or the input ids from 0 to {lookup.rows - 1}."
        )
    low, high = lookup.range()
    fields = [(path_name(path), x.shape) for path, x in leaves_by_path(batch).items()]
    sequences = [f"{name} of shape {shape}" for name, shape in fields if high + 1 in shape[1:]]
    lengths = run_dir.find_fields("sequence_length", cfg.input).items()
    longer = [path for path, n in lengths if isinstance(n, int) and n > lookup.rows]
    shorter = [f"input.{path}={lookup.rows}" for path in longer] or ["shorten the sequences"]
    return (
        f"the model looks up positions from {low} to {high} in {lookup}. The batch has "
        f"{', '.join(sequences) or 'no such sequence'}. Give the table {high + 1} rows, or "
        f"{'set ' if longer else ''}{' '.join(shorter)}."
    )


def _integers(x: Any) -> np.ndarray | None:
    """Returns the values of an array of integers; rows of other processes repeat one of its own."""
    if not (jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool):
        return None
    if isinstance(x, jax.ShapeDtypeStruct):
        return None
    if isinstance(x, np.ndarray) or x.is_fully_addressable:
        return np.asarray(x)
    shards = x.addressable_shards
    if x.ndim and any(shard.data.shape[1:] != x.shape[1:] for shard in shards):
        return None
    values = np.empty(x.shape, x.dtype)
    values[...] = np.asarray(shards[0].data)[:1] if x.ndim else shards[0].data
    for shard in shards:
        values[shard.index] = shard.data
    return values


class _Known(NamedTuple):
    """Knowledge of a variable of a program.

    Attributes:
        value: None if it is unknown.
        fields: those of the batch that the value depends on.
        table: path of the parameter that the variable is.
    """

    value: Any = None
    fields: frozenset[str] = frozenset()
    table: str | None = None


class _Lookup(NamedTuple):
    """Lookup in a table: `axes` of its `shape` are indexed, by the last axis of the indices."""

    table: str
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    sizes: tuple[int, ...]
    indices: _Known

    @property
    def rows(self) -> int:
        return self.shape[self.axes[self._wrong_axis() or 0]]

    def __str__(self) -> str:
        return f"the parameter {self.table}, which has {self.rows} rows, shape {self.shape}"

    def is_wrong(self) -> bool:
        return self._wrong_axis() is not None

    def range(self) -> tuple[int, int]:
        column = self.indices.value[..., self._wrong_axis() or 0]
        return int(column.min()), int(column.max())

    def _wrong_axis(self) -> int | None:
        for i, axis in enumerate(self.axes):
            column, last = self.indices.value[..., i], self.shape[axis] - self.sizes[axis]
            if column.size and (column.min() < 0 or column.max() > last):
                return i
        return None


class _Frame:
    """Call of a program: values of its variables, each computed when it is needed."""

    def __init__(self, jaxpr: "Jaxpr", arguments: Sequence[_Known], consts: Sequence[Any] = ()):
        self._jaxpr = jaxpr
        self._found: dict[Any, _Known] = dict(zip(jaxpr.invars, arguments, strict=True))
        for var, x in zip(jaxpr.constvars, consts, strict=False):
            self._found[var] = _Known(_constant(x))
        self._equations = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self._inner: dict[int, _Frame] = {}

    def lookups(self) -> Iterator[_Lookup]:
        """Yields the lookups in tables with known indices, in the order of the program."""
        for eqn in self._jaxpr.eqns:
            if eqn.primitive.name == "gather":
                yield from self._lookup(eqn)
            elif eqn.primitive.name == "scan":
                yield from self._lookups_in_loop(eqn)
            elif _called(eqn) is not None:
                yield from self._inner_frame(eqn).lookups()

    def _lookup(self, eqn: "JaxprEqn") -> Iterator[_Lookup]:
        # Only who writes mode="clip" gets this mode, and means it.
        if eqn.params["mode"] == jax.lax.GatherScatterMode.CLIP:
            return
        operand, starts = eqn.invars
        table = self.argument(operand).table
        if table is not None and (indices := self.argument(starts)).value is not None:
            axes = eqn.params["dimension_numbers"].start_index_map
            aval: Any = operand.aval
            yield _Lookup(table, aval.shape, axes, eqn.params["slice_sizes"], indices)

    def _lookups_in_loop(self, eqn: "JaxprEqn") -> Iterator[_Lookup]:
        body = eqn.params["jaxpr"].jaxpr
        if not _has_lookups(body):
            return
        num_consts, num_carry = consts_and_carry(eqn.params)
        first_row = num_consts + num_carry
        outer = [self.argument(var) for var in eqn.invars]
        carry, rows = outer[num_consts:first_row], outer[first_row:]
        varies = any(row.value is not None for row in rows)
        for i in range(min(eqn.params["length"], _ITERATIONS if varies else 1)):
            at = -1 - i if eqn.params["reverse"] else i
            given = [x if x.value is None else x._replace(value=x.value[at]) for x in rows]
            before = carry if i == 0 else [_Known()] * len(carry)
            yield from _Frame(body, [*outer[:num_consts], *before, *given]).lookups()

    def argument(self, var: Any) -> _Known:
        """Returns what is known of a variable."""
        if hasattr(var, "val"):
            return _Known(np.asarray(var.val))
        if var not in self._found:
            eqn = self._equations[var]
            self._found[var] = self._computed(eqn, list(eqn.outvars).index(var))
        return self._found[var]

    def _computed(self, eqn: "JaxprEqn", output: int) -> _Known:
        if _called(eqn) is not None:
            inner = self._inner_frame(eqn)
            return inner.argument(inner._jaxpr.outvars[output])
        name = eqn.primitive.name
        if name == "optimization_barrier":
            return self.argument(eqn.invars[output])
        inputs = [self.argument(var) for var in eqn.invars] if name in _RULES else []
        table = inputs[0].table if name in _UNCHANGED else None
        if name not in _RULES or any(x.value is None for x in inputs):
            return _Known(table=table)
        with np.errstate(all="ignore"):
            value = _RULES[name](*(x.value for x in inputs), **eqn.params)
        return _Known(value, frozenset().union(*(x.fields for x in inputs)))

    def _inner_frame(self, eqn: "JaxprEqn") -> "_Frame":
        if id(eqn) not in self._inner:
            called: Any = _called(eqn)
            jaxpr = getattr(called, "jaxpr", called)
            arguments = [self.argument(var) for var in eqn.invars]
            self._inner[id(eqn)] = _Frame(jaxpr, arguments, getattr(called, "consts", ()))
        return self._inner[id(eqn)]


def _called(eqn: "JaxprEqn") -> Any:
    """Returns the program that an equation calls once, with its inputs; None for others."""
    if eqn.primitive.name not in _CALLS:
        return None
    return eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")


def _has_lookups(jaxpr: "Jaxpr") -> bool:
    from jax.extend.core import subjaxprs

    names = (eqn.primitive.name for eqn in jaxpr.eqns)
    return "gather" in names or any(map(_has_lookups, subjaxprs(jaxpr)))


def _constant(x: Any) -> np.ndarray | None:
    is_small = isinstance(x, np.ndarray | np.generic | int)
    return np.asarray(x) if is_small else _integers(x) if hasattr(x, "dtype") else None


def _broadcast(x: np.ndarray, *, shape: Any, broadcast_dimensions: Any, **_: Any) -> np.ndarray:
    sizes = [1] * len(shape)
    for axis, size in zip(broadcast_dimensions, x.shape, strict=True):
        sizes[axis] = size
    return np.broadcast_to(x.reshape(sizes), shape)


def _slice(x: np.ndarray, *, start_indices: Any, limit_indices: Any, strides: Any) -> np.ndarray:
    steps = strides or [1] * x.ndim
    return x[tuple(map(slice, start_indices, limit_indices, steps))]


def _iota(*, dtype: Any, shape: Any, dimension: int, **_: Any) -> np.ndarray:
    sizes = [-1 if axis == dimension else 1 for axis in range(len(shape))]
    return np.broadcast_to(np.arange(shape[dimension], dtype=dtype).reshape(sizes), shape)


def _pad(x: np.ndarray, value: np.ndarray, *, padding_config: Any) -> np.ndarray | None:
    if any(low < 0 or high < 0 or interior for low, high, interior in padding_config):
        return None
    widths = [(low, high) for low, high, _ in padding_config]
    return np.pad(x, widths, constant_values=value)


def _of_arrays(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *xs, **_: fn(*xs)


_UNCHANGED = ("convert_element_type", "copy", "copy_p", "reshard", "sharding_constraint")
_RULES: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(_UNCHANGED, lambda x, **_: x),
    "convert_element_type": lambda x, *, new_dtype, **_: x.astype(new_dtype),
    "reshape": lambda x, *, new_sizes, **_: x.reshape(new_sizes),
    "squeeze": lambda x, *, dimensions: x.squeeze(dimensions),
    "transpose": lambda x, *, permutation: x.transpose(permutation),
    "rev": lambda x, *, dimensions: np.flip(x, dimensions),
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "iota": _iota,
    "pad": _pad,
    "cumsum": lambda x, *, axis, reverse: (
        np.flip(np.cumsum(np.flip(x, axis), axis, x.dtype), axis)
        if reverse
        else np.cumsum(x, axis, x.dtype)
    ),
    "select_n": _of_arrays(lambda which, *cases: np.choose(which, cases)),
    "clamp": _of_arrays(lambda low, x, high: np.clip(x, low, high)),
    **{
        name: _of_arrays(getattr(operator, name))
        for name in ("add", "sub", "mul", "lt", "le", "gt", "ge", "eq", "ne")
    },
    **{
        name: _of_arrays(fn)
        for name, fn in {
            "rem": np.fmod,
            "max": np.maximum,
            "min": np.minimum,
            "and": np.bitwise_and,
            "or": np.bitwise_or,
            "not": np.invert,
        }.items()
    },
}
_CALLS = (
    *("jit", "pjit", "closed_call", "eval_jaxpr", "core_call", "remat", "checkpoint", "remat2"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin"),
)
