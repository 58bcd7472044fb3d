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
from typing import Any, NoReturn, TypeVar

from weft.config.config import ConfigBase, Origin
from weft.config.configurable import Configurable, needs_allow
from weft.config.functions import (
    CallConfig,
    config_for_class,
    config_for_function,
)
from weft.config.references import Use, is_allowed, is_record, resolve_reference
from weft.config.values import (
    REQUIRED,
    UnreadValue,
    Value,
    join_path,
    values_equal,
)
from weft.errors import (
    ConfigError,
    ConfigReferenceError,
    ConfigTextError,
    UnreadableValueError,
    did_you_mean,
)

T = TypeVar("T")

# Below the limit of decimal digits at which Python refuses to convert an int.
_MAX_INT_BITS = 14_000
_NAMES = {"REQUIRED": REQUIRED, "inf": math.inf, "nan": math.nan}


MAX_TEXT = 2**20
"""Characters of the longest text that is read; Python takes up to 500 bytes for each."""


def from_text(
    text: str,
    *,
    allow: Sequence[str] = (),
    source: str = "text",
    keep_unreadable: bool = False,
) -> Any:
    """Reads a config from the text that `to_text` wrote.

    Neither reading nor instantiating the config runs code chosen by the text. It may name functions
    listed in `weft.config.references`, and configurable classes of Weft and of imported modules.
    Fields with effects outside of a run, such as `compilation_cache_dir`, keep their defaults, with
    a log message. See "Configs from untrusted texts" in the guide to configs.

    Args:
        allow: dotted names of further trusted packages, modules, functions or classes, such as your
            own package; they are imported when the text names them.
        source: name of the text for errors and origins, such as a file's path.
        keep_unreadable: whether the value of a field that cannot be read, because only a program
            had it or the text may not name it, is kept as its text. The error is then raised when
            the config of that field is instantiated.

    Raises:
        ConfigTextError: if the text is malformed.
        ConfigReferenceError: for a name that is unknown, or that the text may not use so.
        UnreadableValueError: for a value that only the program had that wrote the text.
        UnknownFieldError: for a field that a config does not have.
        InvalidConfigValueError: for a value that a field does not accept.
    """
    config = read_value(
        text, allow=allow, source=source, keep_unreadable=keep_unreadable
    )
    if not isinstance(config, ConfigBase):
        raise ConfigTextError(
            f"{source} holds a {type(config).__name__}, not a config. "
            "A config begins with the name of its class: package.Class.Config(…)."
        )
    return config


def read_value(
    text: str,
    *,
    allow: Sequence[str] = (),
    source: str = "text",
    keep_unreadable: bool = False,
) -> Value:
    """Reads a single value, see `from_text`; with an empty `source`, errors have no line."""
    source = str(source)
    if len(text) > MAX_TEXT:
        raise ConfigTextError(
            f"{source or 'a value'} has {len(text):,} characters; at most {MAX_TEXT:,} are read. "
            "Put data into files, and their names into the config."
        )
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return _Parser(allow, source, keep_unreadable).read(tree.body)
    except SyntaxError as error:
        where = f"{source}:{error.lineno or 1}: " if source else ""
        raise ConfigTextError(
            f"{where}this is not a config text: {error.msg}."
        ) from None
    except (ValueError, MemoryError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        where = f"{source}: " if source else ""
        raise ConfigTextError(
            f"{where}cannot read this as a config: {error or 'it is nested too deeply'}."
        ) from None


class _Parser:
    def __init__(
        self, allow: Sequence[str], source: str, keep_unreadable: bool
    ):
        self.allow = allow
        self.source = source
        self.keep_unreadable = keep_unreadable
        self.path = ""

    def read(self, node: ast.expr) -> Value:
        reader = self._readers.get(type(node))
        if reader is None:
            raise self._error(node, f"a config has no {type(node).__name__}")
        return reader(self, node)

    def _error(
        self, node: ast.AST, message: str, kind: type = ConfigTextError
    ) -> Exception:
        return kind(self._place(node) + message)

    def _place(self, node: ast.AST) -> str:
        """Returns the beginning of a message about a node."""
        if not self.source:
            return ""
        return f"{self.source}:{getattr(node, 'lineno', 1)}: "

    def _resolve(self, node: ast.expr, name: str, use: Use = "value") -> Value:
        try:
            return resolve_reference(name, allow=self.allow, use=use)
        except ConfigReferenceError as error:
            path = f"{self.path}: " if self.path else ""
            raise self._error(
                node, f"{path}{error}", ConfigReferenceError
            ) from None

    @contextlib.contextmanager
    def _child_path(self, suffix: str) -> Iterator[None]:
        """Appends a suffix (`.name`, `[2]`) to the current path, for errors."""
        parent_path = self.path
        self.path = join_path(parent_path, suffix)
        try:
            yield
        finally:
            self.path = parent_path

    def _read_at(self, suffix: str, node: ast.expr) -> Value:
        with self._child_path(suffix):
            return self.read(node)

    # Values.

    def _constant(self, node: ast.Constant) -> Value:
        if isinstance(node.value, complex) or node.value is Ellipsis:
            raise self._error(node, f"cannot read {ast.unparse(node)}")
        if type(node.value) is int and node.value.bit_length() > _MAX_INT_BITS:
            raise self._error(
                node, f"a number has more than {_MAX_INT_BITS} bits"
            )
        return node.value

    def _negative(self, node: ast.UnaryOp) -> int | float:
        if isinstance(node.op, ast.USub):
            value = self.read(node.operand)
            if type(value) in (int, float):
                return -value
        raise self._error(
            node, "only a number can have a sign, and only a minus"
        )

    def _sequence(self, node: ast.List | ast.Tuple | ast.Set) -> Value:
        items: list[Value] = []
        for i, child in enumerate(node.elts):
            items.append(self._read_at(f"[{i}]", child))
        if isinstance(node, ast.List):
            return items
        if isinstance(node, ast.Tuple):
            return tuple(items)
        return self._make_hashable(node, lambda: set(items))

    def _dict(self, node: ast.Dict) -> dict:
        pairs: list[tuple[Value, Value]] = []
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                raise self._error(node, "a config has no ** in a dict")
            name = self.read(key)
            # A record that lacks fields has no text.
            is_plain = isinstance(name, str | int | float | None)
            place = repr(name) if is_plain else type(name).__name__
            pairs.append((name, self._read_at(f"[{place}]", value)))
        result = self._make_hashable(node, lambda: dict(pairs))
        if len(result) < len(pairs):
            raise self._error(node, "a key is given twice")
        return result

    def _make_hashable(self, node: ast.expr, make: Callable[[], T]) -> T:
        """Makes a set or a dict, whose members must have a hash."""
        try:
            return make()
        except TypeError as error:
            raise self._error(
                node, f"cannot read this {type(node).__name__}: {error}"
            ) from None

    def _name(self, node: ast.expr) -> Value:
        name = self._dotted(node)
        if name in _NAMES:
            return _NAMES[name]
        return self._resolve(node, name)

    def _dotted(self, node: ast.expr) -> str:
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            raise self._error(
                node, "a name is written with dots only, as package.module.name"
            )
        return ".".join([node.id, *reversed(names)])

    # Calls.

    def _call(self, node: ast.Call) -> Value:
        if isinstance(node.func, ast.Call):
            return self._call_config(node, node.func)
        name = self._dotted(node.func)
        if name in _SPECIAL:
            return _SPECIAL[name](self, node)
        if name.endswith(".Config"):
            owner = self._resolve(node, name.removesuffix(".Config"))
            if isinstance(owner, type) and issubclass(owner, Configurable):
                return self._set_fields(node, owner.Config(klass=owner))
        use: Use = "record" if is_record(name) else "value"
        cls = self._resolve(node, name, use)
        if isinstance(cls, type):
            if issubclass(cls, CallConfig):
                raise self._error(
                    node,
                    "write config_for_function(…)(…) or config_for_class(…)(…)",
                )
            if issubclass(cls, ConfigBase):
                return self._set_fields(node, cls())
            if _is_numpy_scalar(cls):
                return self._construct(node, cls, bool, int, float)
        return self._record(node, cls, name)

    def _call_config(self, node: ast.Call, head: ast.Call) -> ConfigBase:
        """Reads `config_for_function(module.fn)(name=value, …)`."""
        maker_name = self._dotted(head.func)
        if maker_name == "unreadable":
            self._unreadable(head)
        maker = _CONFIG_MAKERS.get(maker_name)
        if maker is None or len(head.args) != 1 or head.keywords:
            raise self._error(
                node,
                "only config_for_function(…) and config_for_class(…) make a config",
            )
        (target_node,) = head.args
        target = self._resolve(target_node, self._dotted(target_node), "target")
        try:
            config = maker(target)
        except ConfigError as error:
            raise self._error(node, str(error), type(error)) from None
        return self._set_fields(node, config)

    def _set_fields(self, node: ast.Call, config: ConfigBase) -> ConfigBase:
        if node.args:
            raise self._error(
                node, "the fields of a config are given by name, as dim=8"
            )
        nodes_by_field = self._keyword_nodes(node)
        # The class first, wherever the text has it: it determines the restricted fields.
        field_names = sorted(
            nodes_by_field, key=lambda name: name != config._target
        )
        for name in field_names:
            child = nodes_by_field[name]
            value = self._field_value(name, child)
            if name == config._target and not _may_instantiate(config, value):
                raise self._error(
                    child,
                    f"a text may not set {name!r} to this value",
                    ConfigReferenceError,
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

    def _field_value(self, name: str, node: ast.expr) -> Value:
        """Reads the value of a field of a config."""
        try:
            return self._read_at(f".{name}", node)
        except (UnreadableValueError, ConfigReferenceError) as error:
            if not self.keep_unreadable:
                raise
            return UnreadValue(ast.unparse(node), error.with_traceback(None))

    def _is_ignored(self, config: ConfigBase, name: str, value: Value) -> bool:
        """Returns whether a field is the user's to set, such as an output path."""
        cls = config._field_values().get(config._target or "")
        if not isinstance(cls, type):
            return False
        restricted = needs_allow(cls)
        if isinstance(restricted, bool) or name not in restricted:
            return False
        if value is None or is_allowed(cls, self.allow):
            return False
        default = config._fields()[name].default()
        return not values_equal(value, default)

    def _warn_ignored(
        self, node: ast.expr, config: ConfigBase, name: str, value: Value
    ) -> None:
        path = join_path(self.path, f".{name}")
        logging.getLogger(__name__).warning(
            "%s%s=%.80r is ignored in a text, because it has effects outside of the run. To "
            "set it, pass %s=… on the command line, or set it in a program.",
            self._place(node),
            path,
            value,
            path,
        )

    def _keyword_nodes(self, node: ast.Call) -> dict[str, ast.expr]:
        nodes_by_name: dict[str, ast.expr] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise self._error(node, "a config has no **")
            nodes_by_name[keyword.arg] = keyword.value
        if len(nodes_by_name) < len(node.keywords):
            raise self._error(node, "a field is given twice")
        return nodes_by_name

    def _read_keywords(self, node: ast.Call) -> dict[str, Value]:
        values: dict[str, Value] = {}
        for name, child in self._keyword_nodes(node).items():
            values[name] = self._read_at(f".{name}", child)
        return values

    def _record(self, node: ast.Call, cls: Value, name: str) -> Value:
        """Fills a dataclass, attrs class or named tuple without its constructor."""
        fields = _record_class_fields(cls)
        if not fields:
            raise self._error(
                node,
                f"{name!r} is not called by a text: it is neither a config class nor a record. "
                f"Write config_for_function({name})(…).",
                ConfigReferenceError,
            )
        values = self._read_keywords(node)
        advice = None
        unknown_names = [key for key in values if key not in fields]
        is_tuple = issubclass(cls, tuple)
        if unknown_names:
            advice = did_you_mean(unknown_names[0], fields)
        elif node.args or (is_tuple and len(values) != len(fields)):
            advice = f"Give {', '.join(fields)} by name."
        if advice is not None:
            raise self._error(
                node, f"these are not the fields of {name}. {advice}"
            )
        if is_tuple:
            return tuple.__new__(cls, [values[key] for key in fields])
        record = object.__new__(cls)
        for key, value in values.items():
            object.__setattr__(record, key, value)
        return record

    def _construct(
        self, node: ast.Call, cls: Callable[..., T], *kinds: type
    ) -> T:
        """Calls a harmless class with positional arguments of certain types."""
        if node.keywords:
            raise self._error(
                node, f"{self._dotted(node.func)} takes no names here"
            )
        arguments = [self.read(argument) for argument in node.args]
        if not all(isinstance(argument, kinds) for argument in arguments):
            raise self._error(
                node, f"{self._dotted(node.func)} does not take these values"
            )
        try:
            return cls(*arguments)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise self._error(node, str(error)) from None

    def _dtype(self, node: ast.Call) -> Value:
        # So that NumPy knows bfloat16 and its like by name.
        importlib.import_module("ml_dtypes")
        numpy = importlib.import_module("numpy")
        return self._construct(node, numpy.dtype, str)

    def _partition_spec(self, node: ast.Call) -> Value:
        spec = importlib.import_module("jax").sharding.PartitionSpec
        return self._construct(node, spec, str, tuple, type(None))

    def _partial(self, node: ast.Call) -> functools.partial:
        if not node.args:
            raise self._error(
                node, "functools.partial needs the name of a function"
            )
        function_node, *argument_nodes = node.args
        function = self._resolve(
            function_node, self._dotted(function_node), "partial"
        )
        keywords = self._read_keywords(node)
        if not callable(function):
            raise self._error(
                node, f"{ast.unparse(function_node)} cannot be called"
            )
        arguments = map(self.read, argument_nodes)
        return functools.partial(function, *arguments, **keywords)

    def _unreadable(self, node: ast.Call) -> NoReturn:
        path = f"{self.path}: " if self.path else ""
        raise self._error(
            node,
            f"{path}{ast.unparse(node)} is a value that only the program had that wrote this "
            "text. Set it in a program, or to the config of a function that makes it, as in "
            f"{self.path or 'field'}=config_for_function(my_module.function)().",
            UnreadableValueError,
        )

    _readers: "dict[type, Callable[[_Parser, Any], Value]]" = {
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


# Calls of neither a class nor a config.
_SPECIAL: dict[str, Callable[[_Parser, ast.Call], Value]] = {
    "unreadable": _Parser._unreadable,
    "complex": lambda reader, node: reader._construct(
        node, complex, int, float
    ),
    "set": lambda reader, node: reader._construct(node, set, set),
    "frozenset": lambda reader, node: reader._construct(node, frozenset, set),
    "functools.partial": _Parser._partial,
    "numpy.dtype": _Parser._dtype,
    "jax.sharding.PartitionSpec": _Parser._partition_spec,
}


_CONFIG_MAKERS: dict[str, Callable[[Value], ConfigBase]] = {
    "config_for_function": config_for_function,
    "config_for_class": config_for_class,
}


def _record_class_fields(cls: Value) -> list[str]:
    """Returns the fields of a record's class; none for other classes and for functions."""
    if not isinstance(cls, type):
        return []
    if hasattr(cls, "__attrs_attrs__"):
        return [attribute.name for attribute in cls.__attrs_attrs__]
    if hasattr(cls, "__dataclass_fields__"):
        return list(cls.__dataclass_fields__)
    if issubclass(cls, tuple):
        return list(getattr(cls, "_fields", ()))
    return []


def _may_instantiate(config: ConfigBase, value: Value) -> bool:
    """Returns whether a text may set this class as the target of a config."""
    is_configurable = isinstance(value, type) and issubclass(
        value, Configurable
    )
    return is_configurable and isinstance(config, Configurable.Config)


def _is_numpy_scalar(cls: type) -> bool:
    return any(
        base.__module__ == "numpy" and base.__name__ == "generic"
        for base in cls.__mro__
    )
