"""Validation of names and values of config fields."""

import _thread
import functools
import io
import keyword
import sys
import types
from collections.abc import Callable

from weft.config.values import ConfigNode, Value, child_items, join_path
from weft.errors import InvalidConfigNameError, InvalidConfigValueError

_METHODS = (types.MethodType, types.BuiltinFunctionType)

_validators: list[tuple[Callable[[Value], bool], Callable[[Value], None]]] = []


def register_validator(
    *, match_fn: Callable[[Value], bool], validate_fn: Callable[[Value], None]
) -> None:
    """Registers a validator of values of config fields.

    Args:
        match_fn: returns whether the validator applies to a value; the last registered match wins.
        validate_fn: raises `InvalidConfigValueError` for an invalid value.
    """
    _validators.append((match_fn, validate_fn))


def validate_config_field_name(name: str) -> None:
    """Raises InvalidConfigNameError unless `name` is a public Python identifier."""
    is_identifier = isinstance(name, str) and name.isidentifier()
    if not is_identifier or keyword.iskeyword(name):
        raise InvalidConfigNameError(
            f"A config field cannot be called {name!r}: its name must be a Python identifier."
        )
    if name.startswith("_"):
        public_name = name.lstrip("_") or "value"
        raise InvalidConfigNameError(
            f"A config field cannot be called {name!r}: fields are public, so the name must not "
            f"begin with an underscore. Call it {public_name!r}."
        )


def validate_config_field_value(value: Value) -> None:
    """Checks that a config may hold a value and its nested values.

    Raises InvalidConfigValueError for an instance of a `Configurable`, and for runtime objects:
    modules, open files, sockets, threads, processes, locks, queues, generators and iterators, weak
    references, tracers; also for their methods, or a partial with one.
    """
    check_value(value, path="")


def check_value(
    value: Value, path: str, ancestors: tuple[int, ...] = ()
) -> None:
    """Checks like `validate_config_field_value`, with the path in the error.

    Args:
        ancestors: ids of the containers around the value, to find one that contains itself.
    """
    if isinstance(value, ConfigNode):
        return  # its fields were checked when set
    for match_fn, validate_fn in reversed(_validators):
        if match_fn(value):
            try:
                validate_fn(value)
            except InvalidConfigValueError as error:
                where = f"{path}: " if path else ""
                raise InvalidConfigValueError(f"{where}{error}") from None
            return
    _check_leaf(value, path)
    if isinstance(value, set | frozenset):
        children = [("{…}", child) for child in value]
    elif isinstance(value, functools.partial):
        children = [
            (".args", value.args),
            (".keywords", value.keywords),
            (".func", value.func),
        ]
    else:
        children = child_items(value) or []
    if not children:
        return
    if id(value) in ancestors:
        raise InvalidConfigValueError(
            f"{path or 'The value'} contains itself. A config is a tree of values."
        )
    if isinstance(value, dict):
        for key in value:
            _check_leaf(key, path)
    for suffix, child in children:
        check_value(child, join_path(path, suffix), (*ancestors, id(value)))


_KINDS: tuple[tuple[tuple[type, ...], str], ...] = (
    ((types.ModuleType,), "a Python module"),
    ((io.IOBase,), "an open file"),
    (
        (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType),
        "a generator",
    ),
    ((_thread.LockType, _thread.RLock, _thread._local), "a lock"),
    ((types.FrameType, types.TracebackType), "a frame of the running program"),
    ((map, zip, filter, enumerate, reversed), "an iterator"),
)
# By name, since few programs import these.
_NAMES_BY_KIND = {
    "a lock": "threading.Condition threading.Event threading.Semaphore threading.Barrier "
    "multiprocessing.synchronize.SemLock multiprocessing.synchronize.Condition "
    "multiprocessing.synchronize.Event multiprocessing.synchronize.Barrier "
    "asyncio.locks.Lock asyncio.locks.Event asyncio.locks.Condition asyncio.locks.Semaphore",
    "a thread": "threading.Thread",
    "a process": "multiprocessing.process.BaseProcess subprocess.Popen",
    "a pool of workers": "concurrent.futures._base.Executor multiprocessing.pool.Pool "
    "multiprocessing.managers.BaseManager",
    "a result that is awaited": "concurrent.futures._base.Future _asyncio.Future "
    "_asyncio.Task asyncio.events.AbstractEventLoop",
    "a queue": "queue.Queue _queue.SimpleQueue asyncio.queues.Queue "
    "multiprocessing.queues.Queue multiprocessing.queues.SimpleQueue",
    "a connection": "_socket.socket multiprocessing.connection._ConnectionBase "
    "multiprocessing.connection.Listener sqlite3.Connection sqlite3.Cursor "
    "selectors.BaseSelector socketserver.BaseServer",
    "an open file": "mmap.mmap tempfile._TemporaryFileWrapper tempfile.TemporaryDirectory",
    "a context variable": "_contextvars.ContextVar _contextvars.Token _contextvars.Context",
    "a weak reference": "weakref.ReferenceType",
    "an iterator": "builtins.list_iterator builtins.tuple_iterator builtins.set_iterator "
    "builtins.dict_keyiterator builtins.dict_valueiterator builtins.dict_itemiterator "
    "builtins.range_iterator builtins.str_ascii_iterator builtins.iterator itertools.count "
    "itertools.cycle itertools.repeat itertools.chain itertools.islice itertools.accumulate "
    "itertools.product",
}
_KINDS_BY_NAME: dict[str, str] = {}
for _kind, _names in _NAMES_BY_KIND.items():
    _KINDS_BY_NAME.update(dict.fromkeys(_names.split(), _kind))


@functools.lru_cache(maxsize=1024)
def _runtime_kind(cls: type) -> str | None:
    """Describes the runtime objects of a class; None for plain values."""
    for classes, kind in _KINDS:
        if issubclass(cls, classes):
            return kind
    for base in cls.__mro__:
        kind = _KINDS_BY_NAME.get(f"{base.__module__}.{base.__qualname__}")
        if kind is not None:
            return kind
    return None


def _check_leaf(value: Value, path: str) -> None:
    if isinstance(value, _METHODS):
        owner = value.__self__
        # Functions of C code have their module as owner, class methods their class.
        if owner is not None and not isinstance(owner, type | types.ModuleType):
            _check_leaf(owner, path)
    kind = _runtime_kind(type(value))
    if kind is None:
        jax_core = getattr(sys.modules.get("jax"), "core", None)
        if not isinstance(value, getattr(jax_core, "Tracer", ())):
            return
        kind = "a traced array"
    where = f" in {path}" if path else ""
    raise InvalidConfigValueError(
        f"A config cannot hold {kind}{where}: got an object of type "
        f"{type(value).__qualname__}. A config holds values that can be copied, compared and "
        "written as text; store the name of the object or the function that creates it."
    )
