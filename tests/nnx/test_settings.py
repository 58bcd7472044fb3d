import threading

import jax
import pytest

from weft.nnx.settings import Setting


class level(Setting, default=0):
    """A number."""


def test_it_holds_from_now_on_and_inside_of_with():
    assert level.current() == level.get_default() == 0 and level.get_stack() == []
    with level(1):
        assert level.current() == 1
        with level(2):
            level(3)
            assert level.current() == 3 and level.get_stack() == [1, 3]
        assert level.current() == 1
    assert level.get_stack() == []


def test_an_error_restores_it():
    with pytest.raises(KeyError), level(1):
        raise KeyError
    assert level.current() == 0


def test_one_instance_is_entered_again_and_on_itself():
    setting = level(4)
    assert level.current() == 4
    for _ in range(2):
        with setting, setting:
            assert level.get_stack() == [4, 4]
        assert level.get_stack() == []


def test_it_decorates_functions():
    @level(5)
    def f():
        return level.current()

    assert level.current() == 0 and f() == 5 and f() == 5 and level.current() == 0


def test_it_belongs_to_its_thread():
    seen = []
    with level(6):
        thread = threading.Thread(target=lambda: seen.append(level.current()))
        thread.start()
        thread.join()
    assert seen == [0]


def test_a_function_is_compiled_for_each_value():
    traces = []

    @jax.jit
    def f():
        traces.append(level.current())
        return level.current()

    with level(1):
        first = f(), f()
    with level(2):
        second = f()
    assert first == (1, 1) and second == 2 and traces == [1, 2]
