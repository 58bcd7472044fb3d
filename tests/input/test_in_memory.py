"""Inputs of arrays in memory and of iterables of batches."""

import itertools

import grain
import jax
import numpy as np
import pytest

from weft.config import from_text, to_text
from weft.errors import ConfigTextError, InputDatasetError
from weft.input import ArrayInput, Arrays, Batches, IterableInput
from weft.input.composite import ZipInput

ROWS = 10


def array_input(process=(0, 1), monkeypatch=None, **fields):
    x = np.arange(ROWS, dtype=np.float32)
    arrays = Arrays({"x": x, "in": {"y": 10 * np.arange(ROWS), "z": np.ones((ROWS, 2))}})
    cfg = ArrayInput.default_config().set(name="input", arrays=arrays, global_batch_size=4)
    if monkeypatch:
        monkeypatch.setattr(jax, "process_index", lambda: process[0])
        monkeypatch.setattr(jax, "process_count", lambda: process[1])
    return cfg.set(**fields).instantiate(parent=None)


@pytest.mark.parametrize("is_zipped", [False, True])
def test_processes_that_do_not_divide_the_batch_share_it(monkeypatch, is_zipped):
    (whole,) = take(array_input(), 1)

    def part(index):
        input_ = array_input((index, 3), monkeypatch)
        if is_zipped:
            cfg = ZipInput.default_config().set(name="zip", is_training=True)
            cfg.inputs["a"] = input_.config.clone(input_dispatcher=None)
            input_ = cfg.instantiate(parent=None)
        monkeypatch.setattr(jax, "device_count", lambda: 3)
        return input_, *take(input_, 1)

    inputs, parts = zip(*map(part, range(3)), strict=True)
    rows = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    batch = inputs[0].dispatch_global_batch(rows)
    batch = batch["a"] if is_zipped else batch
    np.testing.assert_array_equal(batch["x"], whole["x"])
    np.testing.assert_array_equal(batch["in"]["z"], whole["in"]["z"])
    assert rows["_logical_row"].tolist() == [0, 1, 2, 3, -1, -1]


def take(input_, n):
    return list(itertools.islice(input_, n))


def test_training_shuffles_each_pass_by_seed():
    batches = take(array_input(), 5)
    first, second = np.concatenate([b["x"] for b in batches]).reshape(2, ROWS)
    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert list(first) != list(second)
    assert all(list(b["in"]["y"]) == list(10 * b["x"]) for b in batches)
    assert list(take(array_input(), 1)[0]["x"]) == list(batches[0]["x"])
    assert list(take(array_input(seed=1), 1)[0]["x"]) != list(batches[0]["x"])


def test_evaluation_pads_the_last_batch():
    *_, last = take(array_input(is_training=False, padding={"x": -1}), 9)
    assert last["x"].tolist() == [8, 9, -1, -1]
    assert last["in"]["y"].tolist() == [80, 90, 0, 0]
    assert last["in"]["z"].tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]
    *_, last = take(array_input(is_training=False), 9)
    assert last["x"].tolist() == [8, 9]


@pytest.mark.parametrize("is_training", [True, False])
def test_batches_do_not_depend_on_the_number_of_processes(is_training, monkeypatch):
    fields = {"is_training": is_training, "padding": {"x": -1}}
    whole = take(array_input(**fields), 3)
    parts = [take(array_input((i, 2), monkeypatch, **fields), 3) for i in range(2)]
    for batch, *own in zip(whole, *parts, strict=True):
        np.testing.assert_array_equal(np.concatenate([b["x"] for b in own]), batch["x"])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((4, 2)), "y": np.zeros(3)}, r"x \(4, 2\), y \(3,\).* same number of rows"),
        ({"x": np.float32(1)}, r"x \(\); expected at least one"),
        ({}, "no array; expected at least one"),
        ({"x": np.zeros((0, 2))}, "arrays x have no rows"),
        ({"x": np.array(["a"])}, "'x' has dtype <U1; expected numbers"),
        ({"x": np.array([2**40])}, "values from 1099511627776 to 1099511627776.* fit int32"),
    ],
)
def test_refused_arrays(arrays, message):
    with pytest.raises(InputDatasetError, match=message):
        Arrays(arrays)


def test_refused_inputs(monkeypatch):
    with pytest.raises(InputDatasetError, match=r"batch of 16 rows is larger than the data.* 10"):
        array_input(global_batch_size=16)
    with pytest.raises(InputDatasetError, match=r"no array 'xx' to pad. Did you mean 'x'"):
        array_input(padding={"xx": 0})
    with pytest.raises(InputDatasetError, match=r"last batch has 2 of 4 rows.*set padding"):
        array_input((0, 2), monkeypatch, is_training=False).dataset()


def test_text_tells_arrays_apart_and_is_not_read():
    arrays = [Arrays({"x": np.float32([1, x])}) for x in (2, 2, 3)]
    a, b, c = (ArrayInput.default_config().set(arrays=x) for x in arrays)
    assert a == b != c
    assert a.clone().arrays is a.arrays
    assert to_text(a) == to_text(b) != to_text(c)
    with pytest.raises(ConfigTextError, match=r"2 rows of x float32.*digest.*in a program"):
        from_text(to_text(a))


def iterable_input(batches, **fields):
    cfg = IterableInput.default_config().set(name="input", batches=Batches(batches), **fields)
    return cfg.instantiate(parent=None)


BATCHES = [{"x": np.full(2, i)} for i in range(3)]


def values(iterator, n):
    return [int(batch["x"][0]) for batch in itertools.islice(iterator, n)]


@pytest.mark.parametrize("batches", [BATCHES, grain.MapDataset.source(BATCHES)])
def test_iterables_repeat_in_training(batches):
    assert values(iterable_input(batches), 7) == [0, 1, 2, 0, 1, 2, 0]
    once = iterable_input(batches, is_training=False)
    assert once.element_spec()["x"].shape == (2,)
    assert values(once, 7) == values(once, 7) == [0, 1, 2]
    iterator = iter(iterable_input(batches).dataset())
    values(iterator, 4)
    again = iter(iterable_input(batches).dataset())
    again.set_state(iterator.get_state())
    assert values(again, 2) == [1, 2]


def test_iterators_come_once():
    input_ = iterable_input(iter(BATCHES))
    assert input_.element_spec()["x"].shape == (2,)
    assert values(input_, 7) == [0, 1, 2]
    assert values(input_, 7) == []


def test_iterable_without_a_batch():
    with pytest.raises(InputDatasetError, match="no batch in the iterable"):
        Batches(iter([]))
