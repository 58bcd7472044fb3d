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

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves_with_path

from weft.config import REQUIRED, ConfigBase
from weft.errors import InputDatasetError, TokenizerError
from weft.hierarchy import LearnedPositionalEmbedding
from weft.input.tokenizers import Tokenizer, as_tokenizer
from weft.lifting.state_creation import consts_and_carry
from weft.trainer import run_dir, train_step
from weft.trainer.optimizers.base import path_name
from weft.trainer.trainer_config_modifier import find_values
from weft.typing import NestedTensor

if TYPE_CHECKING:  # slow to import
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

_SPECIAL = {"pad_token_id": "pad_id", "eos_token_id": "eos_id"}
_ITERATIONS = 64
"""Number of iterations of a loop that are looked at, such as microbatches."""
_MOST_VALUES = 2**26
"""Number of values of an array that are computed: more are activations, not ids or positions."""


def check_tokens(cfg: ConfigBase) -> None:
    """Checks a trainer's config; loads its tokenizers.

    Raises:
        TokenizerError: if a tokenizer has more ids than the model, if they pad or end texts with
            different ids, if such an id is outside of the vocabulary, or if an evaler has another
            tokenizer than the training, or begins texts in another way.
        InputDatasetError: if a sequence is longer than the model's table of positions.
    """
    tokenizers = _tokenizers(cfg)
    vocabulary_sizes: dict[str, int] = {}
    for path, size in run_dir.find_fields("vocab_size", cfg.model).items():
        if isinstance(size, int):
            vocabulary_sizes[path] = size
    if vocabulary_sizes:
        # If there are several, those of text are the larger ones.
        field = max(vocabulary_sizes, key=lambda path: vocabulary_sizes[path])
        size = vocabulary_sizes[field]
        special_ids = _special_ids(cfg.model, field)
        _check_special(field, size, special_ids)
        for path, tokenizer in tokenizers.items():
            _check_vocabulary(path, tokenizer, field, size, special_ids)
    _check_equal(tokenizers)
    _check_lengths(cfg)


def _tokenizers(cfg: ConfigBase) -> dict[str, Tokenizer]:
    """Returns the tokenizers of a trainer's config by path, those of its input first."""
    fields = run_dir.find_fields("tokenizer", cfg)
    bos_fields = run_dir.find_fields("add_bos", cfg)
    tokenizers = {}
    for path in sorted(fields, key=lambda path: not path.startswith("input.")):
        add_bos = bos_fields.get(
            f"{path.removesuffix('tokenizer')}add_bos", False
        )
        tokenizers[path] = as_tokenizer(fields[path], add_bos=add_bos)
    return tokenizers


def _special_ids(model: Any, field: str) -> dict[str, tuple[int, ...]]:
    """Returns the model's special ids by path; a negative one is that of no token."""
    parent = field.rpartition(".")[0]
    owner = model.get_recursively(parent) if parent else model
    special_ids = {}
    for name in _SPECIAL:
        ids = getattr(owner, name, None)
        if isinstance(ids, int):
            ids = (ids,)
        if isinstance(ids, Sequence) and ids:
            special_ids[f"{parent}.{name}".lstrip(".")] = tuple(ids)
    return special_ids


def _check_special(
    field: str, size: int, special_ids: Mapping[str, tuple[int, ...]]
) -> None:
    for path, ids in special_ids.items():
        largest = max(ids)
        if largest >= size:
            raise TokenizerError(
                f"model.{path}={largest} is outside of the vocabulary, model.{field}={size}: its "
                f"ids are 0 to {size - 1}. Set model.{field}={largest + 1} or another id."
            )


def _check_vocabulary(
    path: str,
    tokenizer: Tokenizer,
    field: str,
    size: int,
    special_ids: Mapping[str, tuple[int, ...]],
) -> None:
    faults, overrides = [], []
    if tokenizer.vocab_size > size:
        faults.append(
            f"it has {tokenizer.vocab_size} ids, and model.{field}={size}"
        )
        overrides.append(f"model.{field}={tokenizer.vocab_size}")
    for name, ids in special_ids.items():
        attribute = _SPECIAL[name.rpartition(".")[2]]
        tokenizer_id = getattr(tokenizer, attribute)
        if tokenizer_id not in ids:
            model_ids = ids[0] if len(ids) == 1 else ids
            faults.append(
                f"its {attribute} is {tokenizer_id}, and model.{name}={model_ids}"
            )
            overrides.append(f"model.{name}={tokenizer_id}")
    if faults:
        raise TokenizerError(
            f"the tokenizer of {path} does not fit the model: {'; '.join(faults)}. Set "
            f"{' '.join(overrides)}, or choose the model's own tokenizer."
        )


def _check_equal(tokenizers: Mapping[str, Tokenizer]) -> None:
    """Compares evalers' tokenizers with that of the same field of the input."""
    for path, tokenizer in tokenizers.items():
        # Of `evalers['name'].input.source.tokenizer`, what follows the bracket.
        input_path = path[path.find("].") + 2 :]
        input_tokenizer = tokenizers.get(input_path, tokenizer)
        if _identity(tokenizer) != _identity(input_tokenizer):
            raise TokenizerError(
                f"the tokenizers differ: {input_path} is {input_tokenizer!r}, and {path} is "
                f"{tokenizer!r}. A model understands the ids of one of them; set the same "
                "`tokenizer` and `add_bos` for both."
            )


def _identity(tokenizer: Tokenizer) -> object:
    return getattr(tokenizer, "fingerprint", type(tokenizer))


def _check_lengths(cfg: ConfigBase) -> None:
    # A layer around a table, as of patches of an image, may set its shape later.
    tables = find_values(
        cfg.model,
        lambda _, x: (
            isinstance(x, LearnedPositionalEmbedding.Config)
            and x.shape is not REQUIRED
        ),
    )
    if not tables:
        return
    field, table = max(tables.items(), key=lambda item: item[1].shape[0])
    for path, length in run_dir.find_fields("sequence_length", cfg).items():
        if (
            isinstance(length, int)
            and length > table.shape[0]
            and not path.startswith("model.")
        ):
            raise InputDatasetError(
                f"{path}={length} is longer than the model's table of positions, "
                f"model.{field}.shape={tuple(table.shape)}. Set {path}={table.shape[0]}, or "
                f"model.{field}.shape={length},"
            )


def check_lookups(
    program: "ClosedJaxpr",
    state: train_step.TrainerState,
    batch: NestedTensor,
    cfg: ConfigBase,
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
    state_paths = [path for path, _ in tree_leaves_with_path(state)]
    batch_arrays = {
        path_name(path): x for path, x in tree_leaves_with_path(batch)
    }
    num_other = len(program.jaxpr.invars) - len(state_paths) - len(batch_arrays)
    arguments = []
    for path in state_paths:
        is_parameter = path[0].name == "model"
        arguments.append(
            _Known(table=path_name(path[1:]) if is_parameter else None)
        )
    arguments += [_Known()] * num_other

    def first_wrong(
        values: Mapping[str, np.ndarray | None],
    ) -> "_Lookup | None":
        fields = [
            _Known(value, frozenset([name])) for name, value in values.items()
        ]
        frame = _Frame(program.jaxpr, [*arguments, *fields], program.consts)
        for lookup in frame.lookups():
            if lookup.is_wrong():
                return lookup
        return None

    values = {name: _integers(x) for name, x in batch_arrays.items()}
    lookup = first_wrong(values)
    if lookup is not None:
        raise InputDatasetError(_text(lookup, values, batch_arrays, cfg))
    for path, tokenizer in run_dir.find_fields("tokenizer", cfg.input).items():
        size = as_tokenizer(tokenizer).vocab_size
        largest_ids = dict(values)
        if "input_ids" in batch_arrays:
            largest_ids["input_ids"] = np.full(
                batch_arrays["input_ids"].shape, size - 1
            )
        lookup = first_wrong(largest_ids)
        if lookup is not None:
            raise TokenizerError(
                f"the tokenizer of input.{path} does not fit the model: it has {size} ids, and the "
                f"model looks them up in {lookup}. Give the table {size} rows, or choose the "
                "model's own tokenizer."
            )


def _text(
    lookup: "_Lookup",
    values: Mapping[str, np.ndarray | None],
    batch_arrays: Mapping[str, Any],
    cfg: ConfigBase,
) -> str:
    if lookup.indices.fields:
        ranges = []
        for name in sorted(lookup.indices.fields):
            ids = values[name]
            if ids is not None:
                ranges.append(f"{name} from {ids.min()} to {ids.max()}")
        return (
            f"the batch has ids in {', '.join(ranges)}, and the model looks them up in {lookup}. "
            f"Give the table more rows, or the input ids from 0 to {lookup.rows - 1}."
        )
    low, high = lookup.range()
    sequences = []
    for name, x in batch_arrays.items():
        if high + 1 in x.shape[1:]:
            sequences.append(f"{name} of shape {x.shape}")
    overrides = []
    for path, length in run_dir.find_fields(
        "sequence_length", cfg.input
    ).items():
        if isinstance(length, int) and length > lookup.rows:
            overrides.append(f"input.{path}={lookup.rows}")
    advice = (
        f"set {' '.join(overrides)}" if overrides else "shorten the sequences"
    )
    return (
        f"the model looks up positions from {low} to {high} in {lookup}. The batch has "
        f"{', '.join(sequences) or 'no such sequence'}. Give the table {high + 1} rows, or "
        f"{advice}."
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
            column, last = (
                self.indices.value[..., i],
                self.shape[axis] - self.sizes[axis],
            )
            if column.size and (column.min() < 0 or column.max() > last):
                return i
        return None


class _Frame:
    """Call of a program: values of its variables, each computed when it is needed."""

    def __init__(
        self,
        jaxpr: "Jaxpr",
        arguments: Sequence[_Known],
        consts: Sequence[Any] = (),
    ):
        self._jaxpr = jaxpr
        self._knowledge: dict[Any, _Known] = dict(
            zip(jaxpr.invars, arguments, strict=True)
        )
        for var, x in zip(jaxpr.constvars, consts, strict=False):
            self._knowledge[var] = _Known(_constant(x))
        self._equation_of: dict[Any, JaxprEqn] = {}
        for eqn in jaxpr.eqns:
            self._equation_of.update(dict.fromkeys(eqn.outvars, eqn))
        self._inner_frames: dict[int, _Frame] = {}

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
        if table is None:
            return
        indices = self.argument(starts)
        if indices.value is None:
            return
        axes = eqn.params["dimension_numbers"].start_index_map
        aval: Any = operand.aval
        yield _Lookup(
            table, aval.shape, axes, eqn.params["slice_sizes"], indices
        )

    def _lookups_in_loop(self, eqn: "JaxprEqn") -> Iterator[_Lookup]:
        body = eqn.params["jaxpr"].jaxpr
        if not _has_lookups(body):
            return
        num_consts, num_carry = consts_and_carry(eqn.params)
        inputs = [self.argument(var) for var in eqn.invars]
        consts = inputs[:num_consts]
        carry = inputs[num_consts : num_consts + num_carry]
        xs = inputs[num_consts + num_carry :]
        # Iterations differ in what is sliced for them; the carry is known for the first alone.
        differ = any(x.value is not None for x in xs)
        for i in range(min(eqn.params["length"], _ITERATIONS if differ else 1)):
            index = -1 - i if eqn.params["reverse"] else i
            slices = [
                x if x.value is None else x._replace(value=x.value[index])
                for x in xs
            ]
            yield from _Frame(body, [*consts, *carry, *slices]).lookups()
            carry = [_Known()] * num_carry

    def argument(self, var: Any) -> _Known:
        """Returns what is known of a variable."""
        if hasattr(var, "val"):
            return _Known(np.asarray(var.val))
        if var not in self._knowledge and var not in self._equation_of:
            # A constant, such as that of a custom derivative, whose value is elsewhere.
            return _Known()
        if var not in self._knowledge:
            eqn = self._equation_of[var]
            self._knowledge[var] = self._computed(
                eqn, list(eqn.outvars).index(var)
            )
        return self._knowledge[var]

    def _computed(self, eqn: "JaxprEqn", output: int) -> _Known:
        if _called(eqn) is not None:
            inner = self._inner_frame(eqn)
            return inner.argument(inner._jaxpr.outvars[output])
        name = eqn.primitive.name
        if name == "optimization_barrier":
            return self.argument(eqn.invars[output])
        if name not in _RULES:
            return _Known()
        inputs = [self.argument(var) for var in eqn.invars]
        values = [x.value for x in inputs]
        aval: Any = eqn.outvars[output].aval
        is_large = math.prod(aval.shape) > _MOST_VALUES
        if is_large or any(value is None for value in values):
            return _Known(table=inputs[0].table if name in _UNCHANGED else None)
        with np.errstate(all="ignore"):
            value = _RULES[name](*values, **eqn.params)
        return _Known(value, frozenset().union(*(x.fields for x in inputs)))

    def _inner_frame(self, eqn: "JaxprEqn") -> "_Frame":
        if id(eqn) not in self._inner_frames:
            called: Any = _called(eqn)
            jaxpr = getattr(called, "jaxpr", called)
            arguments = [self.argument(var) for var in eqn.invars]
            consts = getattr(called, "consts", ())
            self._inner_frames[id(eqn)] = _Frame(jaxpr, arguments, consts)
        return self._inner_frames[id(eqn)]


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
    if isinstance(x, np.ndarray | np.generic | int):
        return np.asarray(x)
    return _integers(x) if hasattr(x, "dtype") else None


def _broadcast(
    x: np.ndarray, *, shape: Any, broadcast_dimensions: Any, **_: Any
) -> np.ndarray:
    sizes = [1] * len(shape)
    for axis, size in zip(broadcast_dimensions, x.shape, strict=True):
        sizes[axis] = size
    return np.broadcast_to(x.reshape(sizes), shape)


def _slice(
    x: np.ndarray, *, start_indices: Any, limit_indices: Any, strides: Any
) -> np.ndarray:
    steps = strides or [1] * x.ndim
    return x[tuple(map(slice, start_indices, limit_indices, steps))]


def _iota(*, dtype: Any, shape: Any, dimension: int, **_: Any) -> np.ndarray:
    sizes = [-1 if axis == dimension else 1 for axis in range(len(shape))]
    return np.broadcast_to(
        np.arange(shape[dimension], dtype=dtype).reshape(sizes), shape
    )


def _pad(
    x: np.ndarray, value: np.ndarray, *, padding_config: Any
) -> np.ndarray | None:
    if any(
        low < 0 or high < 0 or interior
        for low, high, interior in padding_config
    ):
        return None
    widths = [(low, high) for low, high, _ in padding_config]
    return np.pad(x, widths, constant_values=value)


def _cumsum(x: np.ndarray, *, axis: int, reverse: bool) -> np.ndarray:
    if not reverse:
        return np.cumsum(x, axis, x.dtype)
    return np.flip(np.cumsum(np.flip(x, axis), axis, x.dtype), axis)


def _elementwise(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *xs, **_: fn(*xs)


_UNCHANGED = (
    "convert_element_type",
    "copy",
    "copy_p",
    "reshard",
    "sharding_constraint",
)
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
    "cumsum": _cumsum,
    "select_n": _elementwise(lambda which, *cases: np.choose(which, cases)),
    "clamp": _elementwise(lambda low, x, high: np.clip(x, low, high)),
    "add": _elementwise(np.add),
    "sub": _elementwise(np.subtract),
    "mul": _elementwise(np.multiply),
    "rem": _elementwise(np.fmod),
    "max": _elementwise(np.maximum),
    "min": _elementwise(np.minimum),
    "lt": _elementwise(np.less),
    "le": _elementwise(np.less_equal),
    "gt": _elementwise(np.greater),
    "ge": _elementwise(np.greater_equal),
    "eq": _elementwise(np.equal),
    "ne": _elementwise(np.not_equal),
    "and": _elementwise(np.bitwise_and),
    "or": _elementwise(np.bitwise_or),
    "not": _elementwise(np.invert),
}
"""NumPy's functions of the primitives by which models compute ids and positions."""
_CALLS = (
    *(
        "jit",
        "pjit",
        "closed_call",
        "eval_jaxpr",
        "core_call",
        "remat",
        "checkpoint",
        "remat2",
    ),
    *(
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
        "custom_lin",
    ),
)
