"""Threads that call a jitted function and change its models at the same time."""

import sys
import threading

import jax.numpy as jnp

from tests.nnx.transforms.changes import Layer
from tests.nnx.transforms.looks import is_like_plain, work
from weft import nnx


def in_threads(*functions):
    """Runs functions at the same time, switching between them as often as can be."""
    errors = []

    def run(fn):
        try:
            fn()
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run, args=(fn,)) for fn in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    for error in errors:
        raise error


def test_threads_with_models_of_their_own():
    f = nnx.jit(work)

    def run():
        model = Layer(1.0)
        for i in range(15):
            model.k = i % 3
            is_like_plain(f, model)
            is_like_plain(f, model)

    in_threads(run, run, run)


def test_a_change_is_seen_while_another_thread_calls_with_the_model():
    f, model, is_done = nnx.jit(lambda m: m.w * m.k), Layer(1.0), threading.Event()
    model.k = 0

    def change():
        try:
            for i in range(300):
                model.k = i % 3
                assert f(model) == i % 3
                model.w = nnx.Param(jnp.float32(2.0))
                assert f(model) == i % 3 * 2
                model.w = nnx.Param(jnp.float32(1.0))
        finally:
            is_done.set()

    def call():
        while not is_done.is_set():
            assert f(model) in (0, 1, 2, 4)

    in_threads(change, call, call)


def test_threads_that_change_one_model_by_calls():
    @nnx.jit
    def f(m):
        m.k = 1 - m.k
        m.w[...] = m.w * 1
        m.layers[0].w[...] = m.layers[0].w + 0
        return m.w + m.k

    model = Layer(1.0)
    model.k, model.layers = 0, [Layer(5.0)]

    def run():
        for _ in range(100):
            assert f(model) in (1, 2)

    in_threads(run, run)
    assert model.w[...] == 1 and model.layers[0].w[...] == 5 and model.k in (0, 1)
