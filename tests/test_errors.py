import contextlib
import copy
import importlib
import inspect
import multiprocessing
import pickle
import pkgutil
from concurrent.futures import ProcessPoolExecutor

import pytest

import weft
from weft import errors
from weft.config import similar_names
from weft.errors import did_you_mean

CLASSES = [c for c in vars(errors).values() if inspect.isclass(c)]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_errors_derive_from_weft_error_with_docstring(cls):
    assert issubclass(cls, errors.WeftError)
    assert inspect.getdoc(cls)
    if cls.__init__ is Exception.__init__ or "__init__" not in vars(cls):
        assert str(cls("what went wrong")) == "what went wrong"
    else:
        required = [
            p
            for p in list(inspect.signature(cls.__init__).parameters.values())[1:]
            if p.default is p.empty
        ]
        assert "what went wrong" in str(cls(*["what went wrong" for _ in required])) or not required


def exceptions_of_weft():
    """Yields every exception class that Weft defines, public or not."""
    for module in pkgutil.walk_packages(weft.__path__, "weft."):
        if "__main__" not in module.name and module.name != "weft.compat.flax.as_flax":
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)

    def below(cls):
        for sub in cls.__subclasses__():
            yield sub
            yield from below(sub)

    found = {cls for cls in below(Exception) if cls.__module__.startswith("weft.")}
    return sorted(found, key=lambda cls: (cls.__module__, cls.__qualname__))


def example(cls):
    """Returns an error with all arguments and an attribute, and a note."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        error = cls("what went wrong")
    else:
        values = {p.name: f"the {p.name}" for p in parameters if p.kind is not p.VAR_KEYWORD}
        by_position = [values.pop(p.name) for p in parameters if p.kind is p.POSITIONAL_ONLY]
        error = cls(*by_position, **values)
    error.seen_at = ("step", 3)
    error.add_note("a note")
    return error


def test_errors_pickle_and_copy():
    classes = exceptions_of_weft()
    assert set(CLASSES) <= set(classes)
    for cls in classes:
        error = example(cls)
        protocols = range(pickle.HIGHEST_PROTOCOL + 1)
        pickled = [pickle.loads(pickle.dumps(error, protocol)) for protocol in protocols]
        for again in (*pickled, copy.copy(error), copy.deepcopy(error)):
            assert type(again) is cls
            assert str(again) == str(error)
            assert again.args == error.args
            assert vars(again) == vars(error), cls
            for name in ("msg", "name", "errno", "filename", "strerror"):
                assert getattr(again, name, None) == getattr(error, name, None), (cls, name)


def test_error_crosses_process_boundary():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as workers:
        error = workers.submit(_fail).exception()
    assert isinstance(error, errors.NameInUseError)
    assert str(error) == str(errors.NameInUseError("param", "kernel", "Dense"))


def _fail():
    raise errors.NameInUseError("param", "kernel", "Dense")


def test_nearest_name_is_first():
    names = ["learning_rate", "learning_rates", "warmup", "rate"]
    assert similar_names("lerning_rate", names)[0] == "learning_rate"
    assert similar_names("Learning_Rate", names)[0] == "learning_rate"


def test_substring_is_near():
    assert similar_names("dropout", ["dropout_rate_of_the_attention", "dim"]) == [
        "dropout_rate_of_the_attention"
    ]


def test_dissimilar_names_are_omitted():
    assert similar_names("xyz", ["learning_rate", "dim"]) == []


def test_sentence_names_at_most_three():
    assert did_you_mean("dim1", ["dim2", "dim3", "dim4", "dim5"]) == (
        "Did you mean 'dim2' or 'dim3' or 'dim4'?"
    )


def test_sentence_lists_all_if_none_is_near():
    assert did_you_mean("xyz", ["dim", "bias"]) == "There are: bias, dim."
    assert did_you_mean("xyz", []) == "There are none."
    assert did_you_mean("xyz", [f"field{i:02}" for i in range(20)]).endswith("field11, ….")
