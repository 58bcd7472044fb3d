import asyncio
import concurrent.futures
import contextvars
import functools
import io
import itertools
import multiprocessing
import queue
import socket
import threading
import weakref

import jax
import pytest

from weft.config import (
    ConfigBase,
    InvalidConfigNameError,
    InvalidConfigValueError,
    config_class,
    register_validator,
    validate_config_field_name,
    validate_config_field_value,
    validation,
)


@config_class
class Holder(ConfigBase):
    value: object = None


@pytest.fixture
def own_validators(monkeypatch):
    monkeypatch.setattr(validation, "_validators", list(validation._validators))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("_x", "must not begin with an underscore. Call it 'x'"),
        ("__x__", "Call it 'x__'"),
        ("_", "Call it 'value'"),
        ("a b", "'a b': its name must be a Python identifier"),
        ("2x", "must be a Python identifier"),
        ("class", "must be a Python identifier"),
        ("", "must be a Python identifier"),
        (3, "must be a Python identifier"),
    ],
)
def test_bad_names(name, message):
    with pytest.raises(InvalidConfigNameError) as error:
        validate_config_field_name(name)
    assert message in str(error.value)


def closed_socket():
    made = socket.socket()
    made.close()
    return made


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: pytest, "a Python module"),
        (io.StringIO, "an open file"),
        (lambda: (x for x in ()), "a generator"),
        (threading.Lock, "a lock"),
        (threading.RLock, "a lock"),
        (threading.Event, "a lock"),
        (threading.Condition, "a lock"),
        (threading.Semaphore, "a lock"),
        (threading.local, "a lock"),
        (multiprocessing.get_context("spawn").Lock, "a lock"),
        (asyncio.Lock, "a lock"),
        (threading.Thread, "a thread"),
        (lambda: threading.Timer(1, print), "a thread"),
        (multiprocessing.get_context("spawn").Process, "a process"),
        (concurrent.futures.ThreadPoolExecutor, "a pool of workers"),
        (concurrent.futures.Future, "a result that is awaited"),
        (queue.Queue, "a queue"),
        (queue.SimpleQueue, "a queue"),
        (closed_socket, "a connection"),
        (lambda: contextvars.ContextVar("x"), "a context variable"),
        (lambda: weakref.ref(Holder), "a weak reference"),
        (lambda: iter([1]), "an iterator"),
        (lambda: map(str, [1]), "an iterator"),
        (itertools.count, "an iterator"),
        (lambda: functools.partial(print, threading.Lock()), "a lock"),
        (lambda: functools.partial(print, file=[io.StringIO()]), "an open file"),
        (lambda: threading.Thread().start, "a thread"),
        (lambda: threading.Lock().acquire, "a lock"),
    ],
)
@pytest.mark.parametrize(
    ("wrap", "where"),
    [
        (lambda v: v, "value"),
        (lambda v: [1, v], r"value[1]"),
        (lambda v: {"a": (v,)}, r"value['a'][0]"),
    ],
)
def test_bad_values(make, kind, wrap, where):
    value = make()
    cfg = Holder()
    with pytest.raises(InvalidConfigValueError) as error:
        cfg.value = wrap(value)
    assert f"A config cannot hold {kind} in {where}" in str(error.value)
    assert ": got an object of type" in str(error.value)
    assert "store the name of the object or the function that creates it" in str(error.value)
    with pytest.raises(InvalidConfigValueError, match=f"cannot hold {kind}"):
        validate_config_field_value(wrap(value))


def test_bad_values_in_sets_and_keys():
    with pytest.raises(InvalidConfigValueError, match="a Python module"):
        Holder(value={pytest})
    with pytest.raises(InvalidConfigValueError, match="a Python module"):
        Holder(value={pytest: 1})


def test_tracer_is_rejected():
    @jax.jit
    def f(x):
        Holder(value=x)
        return x

    with pytest.raises(InvalidConfigValueError, match="a traced array in value"):
        f(1.0)


def test_recursive_container():
    loop = []
    loop.append(loop)
    with pytest.raises(InvalidConfigValueError, match=r"value\[0\] contains itself"):
        Holder(value=loop)
    shared = [1]
    assert Holder(value=[shared, shared]).value == [[1], [1]]


def test_custom_rule(own_validators):
    def refuse(value):
        raise InvalidConfigValueError(f"{value} is too big")

    register_validator(match_fn=lambda v: isinstance(v, int) and v > 100, validate_fn=refuse)
    Holder(value=[1])
    with pytest.raises(InvalidConfigValueError, match=r"value\['a'\]\[1\]: 101 is too big"):
        Holder(value={"a": [1, 101]})
    with pytest.raises(InvalidConfigValueError, match=r"^101 is too big"):
        validate_config_field_value(101)


def test_last_rule_takes_precedence(own_validators):
    register_validator(match_fn=lambda v: v is pytest, validate_fn=lambda v: None)
    assert Holder(value=pytest).value is pytest
