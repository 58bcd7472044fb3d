"""Parser of config texts, which evaluates nothing.

Accepts only some nodes of Python's syntax tree: literals, containers, dotted names and the calls
that `weft.config.text_writer` writes. Records are filled without their constructors.
`weft.config.references` restricts names.
"""

import ast
import contextlib
import functools
import importlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from weft.config.config import ConfigBase, Origin
from weft.config.configurable import Configurable, needs_allow
from weft.config.functions import CallConfig, config_for_class, config_for_function
from weft.config.references import Use, is_allowed, is_record, resolve_reference
from weft.config.values import REQUIRED, join_path, values_equal
from weft.errors import ConfigError, ConfigReferenceError, ConfigTextError, did_you_mean

# Below the limit of decimal digits at which Python refuses to convert an int.
_MAX_INT_BITS = 14_000
_NAMES = {"REQUIRED": REQUIRED, "inf": math.inf, "nan": math.nan}


MAX_TEXT = 2**20
"""Characters of the longest text that is read; Python takes up to 500 bytes for each."""


def from_text(text: str, *, allow: Sequence[str] = (), source: str = "text") -> Any:
    """Reads a config from the text that `to_text` wrote.

    Neither reading nor instantiating the config runs code chosen by the text. It may name functions
    listed in `weft.config.references`, and configurable classes of Weft and of imported modules.
    Fields with effects outside of a run, such as `compilation_cache_dir`, keep their defaults, with
    a log message. See "Texts from elsewhere" in docs/config.md.

    Args:
        allow: dotted names of further trusted packages, modules, functions or classes, such as your
            own package; they are imported when the text names them.
        source: name of the text for errors and origins, such as a file's path.

    Raises:
        ConfigTextError: if the text is malformed.
        ConfigReferenceError: for a name that is unknown, or that the text may not use so.
        UnknownFieldError: for a field that a config does not have.
        InvalidConfigValueError: for a value that a field does not accept.
    """
    config = read_value(text, allow=allow, source=source)
    if not isinstance(config, ConfigBase):
        raise ConfigTextError(
            f"{source} holds a {type(config).__name__}, not a config. "
            "A config begins with the name of its class: package.Class.Config(…)."
        )
    return config


def read_value(text: str, *, allow: Sequence[str] = (), source: str = "text") -> Any:
    """Reads a single value, see `from_text`; with an empty `source`, errors have no line."""
    source = str(source)
    if len(text) > MAX_TEXT:
        raise ConfigTextError(
            f"{source or 'a value'} has {len(text):,} characters; at most {MAX_TEXT:,} are read. "
            "Put data into files, and their names into the config."
        )
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return _Parser(allow, source).read(tree.body)
    except SyntaxError as error:
        where = f"{source}:{error.lineno or 1}: " if source else ""
        raise ConfigTextError(f"{where}this is not a config text: {error.msg}.") from None
    except (ValueError, MemoryError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        where = f"{source}: " if source else ""
        raise ConfigTextError(
            f"{where}cannot read this as a config: {error or 'it is nested too deeply'}."
        ) from None


class _Parser:
    def __init__(self, allow: Sequence[str], source: str):
        self.allow = allow
        self.source = source
        self.path = ""

    def read(self, node: ast.expr) -> Any:
        reader = self._readers.get(type(node))
        if reader is None:
            raise self._error(node, f"a config has no {type(node).__name__}")
        return reader(self, node)

    def _error(self, node: ast.AST, message: str, kind: type = ConfigTextError) -> Exception:
        where = f"{self.source}:{getattr(node, 'lineno', 1)}: " if self.source else ""
        return kind(where + message)

    def _resolve(self, node: ast.expr, name: str, use: Use = "value") -> Any:
        try:
            return resolve_reference(name, allow=self.allow, use=use)
        except ConfigReferenceError as error:
            path = f"{self.path}: " if self.path else ""
            raise self._error(node, f"{path}{error}", ConfigReferenceError) from None

    @contextlib.contextmanager
    def _child_path(self, suffix: str) -> Iterator[None]:
        """Appends a suffix (`.name`, `[2]`) to the current path, for errors."""
        before, self.path = self.path, join_path(self.path, suffix)
        try:
            yield
        finally:
            self.path = before

    def _read_at(self, suffix: str, node: ast.expr) -> Any:
        with self._child_path(suffix):
            return self.read(node)

    # Values.

    def _constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, complex) or node.value is Ellipsis:
            raise self._error(node, f"cannot read {ast.unparse(node)}")
        if type(node.value) is int and node.value.bit_length() > _MAX_INT_BITS:
            raise self._error(node, f"a number has more than {_MAX_INT_BITS} bits")
        return node.value

    def _negative(self, node: ast.UnaryOp) -> Any:
        value: Any = self.read(node.operand) if isinstance(node.op, ast.USub) else None
        if type(value) not in (int, float):
            raise self._error(node, "only a number can have a sign, and only a minus")
        return -value

    def _sequence(self, node: Any) -> Any:
        kind = {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)]
        items = [self._read_at(f"[{i}]", child) for i, child in enumerate(node.elts)]
        return self._make_hashable(node, lambda: kind(items))

    def _dict(self, node: ast.Dict) -> dict:
        pairs = []
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                raise self._error(node, "a config has no ** in a dict")
            name = self.read(key)
            pairs.append((name, self._read_at(f"[{name!r}]", value)))
        result = self._make_hashable(node, lambda: dict(pairs))
        if len(result) < len(pairs):
            raise self._error(node, "a key is given twice")
        return result

    def _make_hashable(self, node: ast.expr, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except TypeError as error:
            raise self._error(node, f"cannot read this {type(node).__name__}: {error}") from None

    def _name(self, node: ast.expr) -> Any:
        name = self._dotted(node)
        return _NAMES[name] if name in _NAMES else self._resolve(node, name)

    def _dotted(self, node: ast.expr) -> str:
        names = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            raise self._error(node, "a name is written with dots only, as package.module.name")
        return ".".join([node.id, *reversed(names)])

    # Calls.

    def _call(self, node: ast.Call) -> Any:
        if isinstance(node.func, ast.Call):
            return self._call_config(node, node.func)
        name = self._dotted(node.func)
        if name in _SPECIAL:
            return _SPECIAL[name](self, node)
        if name.endswith(".Config"):
            owner = self._resolve(node, name.removesuffix(".Config"))
            if isinstance(owner, type) and issubclass(owner, Configurable):
                return self._set_fields(node, owner.Config(klass=owner))
        cls = self._resolve(node, name, "record" if is_record(name) else "value")
        if isinstance(cls, type) and issubclass(cls, CallConfig):
            raise self._error(node, "write config_for_function(…)(…) or config_for_class(…)(…)")
        if isinstance(cls, type) and issubclass(cls, ConfigBase):
            return self._set_fields(node, cls())
        if isinstance(cls, type) and _is_numpy_scalar(cls):
            return self._construct(node, cls, bool, int, float)
        return self._record(node, cls, name)

    def _call_config(self, node: ast.Call, head: ast.Call) -> ConfigBase:
        """Reads `config_for_function(module.fn)(name=value, …)`."""
        makers = {"config_for_function": config_for_function, "config_for_class": config_for_class}
        maker = makers.get(self._dotted(head.func))
        if maker is None or len(head.args) != 1 or head.keywords:
            if self._dotted(head.func) == "unreadable":
                self._unreadable(head)
            raise self._error(
                node, "only config_for_function(…) and config_for_class(…) make a config"
            )
        target = self._resolve(head.args[0], self._dotted(head.args[0]), "target")
        try:
            config = maker(target)
        except ConfigError as error:
            raise self._error(node, str(error), type(error)) from None
        return self._set_fields(node, config)

    def _set_fields(self, node: ast.Call, config: ConfigBase) -> ConfigBase:
        if node.args:
            raise self._error(node, "the fields of a config are given by name, as dim=8")
        named = self._keyword_nodes(node)
        # The class first, wherever the text has it: it determines the restricted fields.
        for name, child in sorted(named, key=lambda pair: pair[0] != config._target):
            value = self._read_at(f".{name}", child)
            if name == config._target and not _may_instantiate(config, value):
                raise self._error(
                    child, f"a text may not set {name!r} to this value", ConfigReferenceError
                )
            if self._is_ignored(config, name, value):
                self._warn_ignored(child, config, name, value)
                continue
            try:
                setattr(config, name, value)
            except ConfigError as error:
                raise self._error(child, str(error), type(error)) from None
            config._origins[name] = Origin(self.source, child.lineno)
        return config

    def _is_ignored(self, config: ConfigBase, name: str, value: object) -> bool:
        """Returns whether a field is the user's to set, such as an output path."""
        cls = config._field_values().get(config._target or "")
        if not isinstance(cls, type):
            return False
        restricted = needs_allow(cls)
        if isinstance(restricted, bool) or name not in restricted:
            return False
        default = config._fields()[name].default()
        return not (is_allowed(cls, self.allow) or value is None or values_equal(value, default))

    def _warn_ignored(self, node: ast.expr, config: ConfigBase, name: str, value: object) -> None:
        line = f"{self.source}:{node.lineno}: " if self.source else ""
        logging.getLogger(__name__).warning(
            "%s%s=%.80r is ignored in a text, because it has effects outside of the run. To "
            "set it, pass %s=… on the command line, or set it in a program.",
            *(line, join_path(self.path, f".{name}"), value, join_path(self.path, f".{name}")),
        )

    def _keyword_nodes(self, node: ast.Call) -> list[tuple[str, ast.expr]]:
        if any(keyword.arg is None for keyword in node.keywords):
            raise self._error(node, "a config has no **")
        pairs: Any = [(keyword.arg, keyword.value) for keyword in node.keywords]
        if len(dict(pairs)) < len(pairs):
            raise self._error(node, "a field is given twice")
        return pairs

    def _record(self, node: ast.Call, cls: Any, name: str) -> Any:
        fields: list[str] = []
        new = None
        if not isinstance(cls, type):
            pass
        elif hasattr(cls, "__attrs_attrs__"):
            fields, new = [a.name for a in cls.__attrs_attrs__], object.__new__(cls)
        elif hasattr(cls, "__dataclass_fields__"):
            fields, new = list(cls.__dataclass_fields__), object.__new__(cls)
        elif issubclass(cls, tuple):
            fields = list(getattr(cls, "_fields", ()))
        if not fields:
            raise self._error(
                node,
                f"{name!r} is not called by a text: it is neither a config class nor a record. "
                f"Write config_for_function({name})(…).",
                ConfigReferenceError,
            )
        values = {key: self._read_at(f".{key}", value) for key, value in self._keyword_nodes(node)}
        unknown = [key for key in values if key not in fields]
        if unknown or node.args or (new is None and len(values) != len(fields)):
            wrong = (
                did_you_mean(unknown[0], fields)
                if unknown
                else f"Give {', '.join(fields)} by name."
            )
            raise self._error(node, f"these are not the fields of {name}. {wrong}")
        if new is None:
            return tuple.__new__(cls, [values[key] for key in fields])
        for key, value in values.items():
            object.__setattr__(new, key, value)
        return new

    def _construct(self, node: ast.Call, cls: Callable, *kinds: Any) -> Any:
        if node.keywords:
            raise self._error(node, f"{self._dotted(node.func)} takes no names here")
        arguments = [self.read(argument) for argument in node.args]
        if not all(isinstance(argument, kinds) for argument in arguments):
            raise self._error(node, f"{self._dotted(node.func)} does not take these values")
        try:
            return cls(*arguments)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise self._error(node, str(error)) from None

    def _dtype(self, node: ast.Call) -> Any:
        importlib.import_module("ml_dtypes")  # so that NumPy knows bfloat16 and its like by name
        return self._construct(node, importlib.import_module("numpy").dtype, str)

    def _partition_spec(self, node: ast.Call) -> Any:
        spec = importlib.import_module("jax").sharding.PartitionSpec
        return self._construct(node, spec, str, tuple, type(None))

    def _partial(self, node: ast.Call) -> Any:
        if not node.args:
            raise self._error(node, "functools.partial needs the name of a function")
        function = self._resolve(node.args[0], self._dotted(node.args[0]), "partial")
        named = {
            name: self._read_at(f".{name}", value) for name, value in self._keyword_nodes(node)
        }
        if not callable(function):
            raise self._error(node, f"{ast.unparse(node.args[0])} cannot be called")
        return functools.partial(function, *map(self.read, node.args[1:]), **named)

    def _unreadable(self, node: ast.Call) -> Any:
        written = ast.unparse(node)
        raise self._error(
            node, f"{written} could not be written down. Set this value in a program instead."
        )

    _readers: "dict[type, Callable[[_Parser, Any], Any]]" = {
        ast.Constant: _constant,
        ast.UnaryOp: _negative,
        ast.List: _sequence,
        ast.Tuple: _sequence,
        ast.Set: _sequence,
        ast.Dict: _dict,
        ast.Name: _name,
        ast.Attribute: _name,
        ast.Call: _call,
    }


_SPECIAL: dict[str, Callable[[_Parser, ast.Call], Any]] = {
    "unreadable": _Parser._unreadable,
    "complex": lambda reader, node: reader._construct(node, complex, int, float),
    "set": lambda reader, node: reader._construct(node, set, set),
    "frozenset": lambda reader, node: reader._construct(node, frozenset, set),
    "functools.partial": _Parser._partial,
    "numpy.dtype": _Parser._dtype,
    "jax.sharding.PartitionSpec": _Parser._partition_spec,
}


def _may_instantiate(config: ConfigBase, value: object) -> bool:
    """Returns whether a text may set this class as the target of a config."""
    is_configurable = isinstance(value, type) and issubclass(value, Configurable)
    return is_configurable and isinstance(config, Configurable.Config)


def _is_numpy_scalar(cls: type) -> bool:
    return any(base.__module__ == "numpy" and base.__name__ == "generic" for base in cls.__mro__)
