"""Looks for effects of what the text of a config can have called, in a process of its own.

    python -m tests.config.effects [--quick] [--planted NAME,... --planted-names NAME,...]

prints as JSON what it has found and how many calls it has made: pairs of a callable and a name, or
a config class, whose call opened a file to write, changed a folder, started a process, opened a
connection, read a pickle or imported a planted module. An audit hook of Python sees these, and
stops them. It tries all of `weft.config.references` and all configurable classes.

Planted callables, with planted names as their arguments, are searched first and in the same way;
what is found there is printed apart, and shows that the search finds something.

The arguments are what a text can give: paths to write, a planted pickle, names of a planted module,
containers of these, and all other names, with arguments bound to them or not.
"""

import argparse
import contextlib
import functools
import gc
import importlib
import inspect
import json
import os
import pickle
import pkgutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
HARMLESS_OF_OS = {"os.listdir", "os.scandir", "os.walk", "os.getxattr", "os.listxattr", "os.fwalk"}
HARMFUL = (
    *("os.", "shutil.", "subprocess.", "socket.", "pickle.", "tempfile.", "urllib.", "ctypes.dl"),
    *(
        "marshal.loads",
        "pty.",
        "webbrowser.",
        "ftplib.",
        "smtplib.",
        "http.client.",
        "mmap.__new__",
    ),
)


class Stopped(BaseException):
    """An effect, stopped before it happens. Not an `Exception`, which a callable may catch."""


class Watch:
    """Records effects while it is on, and stops them; each call may take some seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.is_on = False
        self.seen: list[str] = []
        self._open_before = frozenset(map(int, os.listdir("/dev/fd")))
        sys.addaudithook(self._hook)
        signal.signal(signal.SIGALRM, _stop_call)
        # `importlib.import_module` raises no event.
        sys.meta_path.insert(0, self)  # pyright: ignore[reportArgumentType]

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Records that the planted module is looked up."""
        del path, target
        if self.is_on and name.startswith("planted_module"):
            self._stop(f"import {name}")

    def _stop(self, effect: str) -> NoReturn:
        self.is_on = False
        self.seen.append(effect)
        raise Stopped(effect)

    def _hook(self, event: str, arguments: tuple) -> None:
        if self.is_on and self._is_effect(event, arguments):
            self._stop(f"{event}({', '.join(map(_short, arguments))})")

    def _is_effect(self, event: str, arguments: tuple) -> bool:
        if event == "open":
            path, mode, flags = arguments
            if isinstance(path, int):  # a descriptor, which is closed with the file
                return path in self._open_before
            writes = isinstance(mode, str) and set(mode) & set("wax+")
            acts = bool(writes or (isinstance(flags, int) and flags & WRITES))
        else:
            acts = event.startswith(HARMFUL) and event not in HARMLESS_OF_OS
        return acts and not _is_importing()

    def effects_of(self, call: Callable[[], Any]) -> tuple[list[str], Any]:
        """Calls, and returns the effects, and what came of it, None after an error."""
        self.seen, self.is_on = [], True
        result = None
        try:
            signal.setitimer(signal.ITIMER_REAL, self.seconds)
            result = call()
        except (Exception, Stopped):
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.is_on = False
        return self.seen, result


def _is_importing() -> bool:
    """Returns whether a module is being imported, one that a listed function itself asks for."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _short(argument: object) -> str:
    return repr(argument)[:60]


class _TooLong(Exception):
    pass


def _stop_call(*_: object) -> NoReturn:
    raise _TooLong


class _Detonates:
    def __reduce__(self) -> Any:
        return os.getpid, ()


class Search:
    """Calls every callable with every name, and with all that a text can write besides."""

    def __init__(self, folder: Path, *, quick: bool = False) -> None:
        import numpy as np

        self.watch = Watch(1.0 if quick else 5.0)
        self.path = str(folder / "written")
        self.pickle = str(folder / "planted.npy")
        np.save(self.pickle, np.array([_Detonates()], object), allow_pickle=True)
        (folder / "planted.pkl").write_bytes(pickle.dumps(_Detonates()))
        (folder / "planted_module.py").write_text("", encoding="utf-8")
        sys.path.insert(0, str(folder))
        self.plain: list[Any] = [
            *(self.path, self.pickle, str(folder / "planted.pkl"), str(folder)),
            *("planted_module", "planted_module.f", "ASCII", 1, 2.5, True, None),
            *([], [1.0], {"a": "ASCII"}, [self.path], {"a": self.path}, {"a": self.pickle}),
        ]
        # Arguments after the path, of functions that write or read a pickle.
        self.tails: list[tuple] = [
            *((self.path,), (self.path, [1.0]), (self.pickle,), (self.pickle, None, True)),
            *(([1.0], self.path), ("planted_module",), ({"a": self.path},)),
        ]
        if quick:
            self.plain = [self.path, self.pickle, "planted_module", 1, [1.0], {"a": self.path}]
            self.tails = [*self.tails[:4], self.tails[-1]]
        self.quick = quick
        self.calls = 0
        self.uses: dict[str, int] = {}
        self.found: dict[str, list[str]] = {}

    def try_call(self, label: str, call: Callable[[], Any]) -> Any:
        self.calls += 1
        effects, result = self.watch.effects_of(call)
        if effects:
            # Imports happen only at the first call.
            effects, result = self.watch.effects_of(call)
        if effects:
            self.found.setdefault(label, effects)
        return result

    def alone(self, name: str, fn: Callable) -> list[Any]:
        """Calls one function with plain values; returns what it gave."""
        results = []
        parameters = _parameters(fn)
        attempts: list[tuple[tuple, dict]] = [((), {}), *((tail, {}) for tail in self.tails)]
        # Compiling JAX computations of numbers takes most of the time of a search.
        skipped = (1,) if self.quick and name.startswith("jax.") else ()
        for value in (value for value in self.plain if value not in skipped):
            attempts += [((value,), {}), ((value, value), {})]
            required = {p: value for p, (needed, _) in parameters.items() if needed}
            attempts += [((), required)]
            attempts += [((), required | {p: value}) for p in parameters]
        for args, kwargs in attempts:
            result = self.try_call(name, functools.partial(fn, *args, **kwargs))
            if result is not None:
                results.append(result)
                self.use(name, result, at_most=4)
        return results

    def use(self, label: str, result: Any, *, at_most: int = 40) -> None:
        """Calls what a call gave, or the functions in it; of a function's many results, some."""
        self.uses[label] = self.uses.get(label, 0) + 1
        if self.uses[label] > at_most:
            return
        fields = getattr(result, "_fields", None)
        inner = [getattr(result, f) for f in fields] if fields else [result]
        for fn in inner:
            if callable(fn):
                for tail in ((), *self.tails):
                    self.try_call(f"{label} then its result", functools.partial(fn, *tail))

    def calls_its_argument(self, name: str, fn: Callable) -> bool:
        """Returns whether a function was seen to call a function that it was given."""
        called = []

        def spy(*args: Any, **kwargs: Any) -> Any:
            called.append(True)
            return args[0] if args else 1.0

        for value in (spy, [spy], {"a": spy}, (spy, spy)):
            self.pair(name, fn, "a spy", value)
            if called:
                break
        return bool(called)

    def pair(self, name: str, fn: Callable, other: str, value: Any) -> None:
        """Calls a function with another as its argument."""
        label = f"{name} with {other}"
        for tail in self.tails:
            bound = functools.partial(value, *tail) if callable(value) else value
            for args in ((value, *tail), (value, [], *tail), (bound,), (bound, [], *tail[:1])):
                self.try_call(label, functools.partial(fn, *args))
        bound = functools.partial(value, *self.tails[1]) if callable(value) else value
        for parameter, (_, wants_value) in _parameters(fn).items():
            if wants_value:
                rest = {p: self.path for p, (needed, _) in _parameters(fn).items() if needed}
                for argument in (value, bound):
                    call = functools.partial(fn, **{**rest, parameter: argument})
                    self.use(label, self.try_call(label, call))

    def config(self, name: str) -> None:
        """Reads configs of a class with values that act, and makes objects of them."""
        from weft.config import from_text
        from weft.config.references import resolve_reference
        from weft.errors import ConfigError

        default = resolve_reference(name).default_config()
        fields = [f for f, _ in default.items() if f != "klass"]
        for value in (self.path, self.pickle, "planted_module", [self.path]):
            every = ", ".join(f"{f}={value!r}" for f in fields if _fits(default, f, value))
            for text in (f"{name}.Config({every})", f"{name}.Config({every}, name='x')"):
                try:
                    cfg = from_text(text)
                except ConfigError:  # the fields do not take such a value
                    continue
                made = self.try_call(name, cfg.instantiate)
                made = self.try_call(name, functools.partial(cfg.instantiate, parent=None)) or made
                if callable(made):
                    self.try_call(name, functools.partial(made, 1, {"a": 1.0}))


def _fits(cfg: Any, field: str, value: Any) -> bool:
    from weft.errors import ConfigError

    try:
        cfg.set(**{field: value})
    except ConfigError:
        return False
    return True


@functools.cache
def _parameters(fn: Callable) -> dict[str, tuple[bool, bool]]:
    """Returns whether a parameter is needed, and whether it may want a function, by name."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {
        p.name: (p.default is p.empty, p.default is p.empty or callable(p.default) or not p.default)
        for p in parameters
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }


def _import_weft() -> None:
    import weft

    for module in pkgutil.walk_packages(weft.__path__, "weft."):
        if not module.name.startswith(("weft.cli", "weft.__main__", "weft.compat.flax.as_flax")):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)


def configurables() -> Iterator[str]:
    """Yields the names of all configurable classes of Weft that a text may name."""
    from weft.config import ConfigReferenceError, Configurable
    from weft.config.references import resolve_reference

    def below(cls: type) -> Iterator[type]:
        for sub in cls.__subclasses__():
            yield sub
            yield from below(sub)

    for cls in sorted(set(below(Configurable)), key=str):
        name = f"{cls.__module__}.{cls.__qualname__}"
        with contextlib.suppress(ConfigReferenceError):
            if name.startswith("weft.") and resolve_reference(name) is cls:
                yield name


def _resolve(name: str) -> Any:
    names = name.split(".")
    for end in range(len(names) - 1, 0, -1):
        with contextlib.suppress(ImportError):
            importlib.import_module(".".join(names[:end]))
            return functools.reduce(getattr, names[end:], sys.modules[".".join(names[:end])])
    raise LookupError(name)


def _once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that keeps what it gave for arguments with the same text."""
    known: dict[str, Any] = {}

    def call(*args: Any) -> Any:
        if repr(args) not in known:
            known[repr(args)] = fn(*args)
        return known[repr(args)]

    return call


def _search_callables(
    search: Search, callables: Sequence[str], names: Sequence[str], *, of_names: int = 1
) -> list[str]:
    """Searches callables, and returns those that call what they are given.

    Args:
        search: what searches.
        callables: their names.
        names: what each that calls its argument is given.
        of_names: give each callable only one in so many of the names, others to the next one.
    """
    values = {name: _resolve(name) for name in names}
    called = []
    for name in callables:
        fn = _resolve(name)
        search.alone(name, fn)
        # Only called objects can act.
        if search.calls_its_argument(name, fn):
            for other in names[len(called) % of_names :: of_names]:
                search.pair(name, fn, other, values[other])
            called.append(name)
    return called


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--planted", default="")
    parser.add_argument("--planted-names", default="")
    parser.add_argument("--quick", action="store_true", help="fewer arguments and pairs")
    options = parser.parse_args(argv)
    _import_weft()
    from sklearn import datasets

    from weft.config.references import TARGETS, VALUES
    from weft.input import corpus

    if options.quick:  # a hundred calls read the standard library's text, or the images of digits
        corpus._list_files = _once(corpus._list_files)
        corpus._documents = _once(corpus._documents)
        datasets.load_digits = _once(datasets.load_digits)
        gc.set_threshold(50_000, 20)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        search = Search(Path(folder), quick=options.quick)
        if options.planted:
            _search_callables(search, options.planted.split(","), options.planted_names.split(","))
        result["planted"], search.found = search.found, {}
        result["called"] = _search_callables(
            search, sorted(VALUES | TARGETS), sorted(VALUES), of_names=12 if options.quick else 1
        )
        for name in configurables():
            search.config(name)
        os.chdir("/")
    print(json.dumps({**result, "calls": search.calls, "found": search.found}))


if __name__ == "__main__":
    try:
        main()
    except Stopped:
        traceback.print_exc()
        sys.exit(1)
