import inspect

import pytest

from weft import errors

CLASSES = [c for c in vars(errors).values() if inspect.isclass(c)]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_every_error_is_a_weft_error_that_says_what_it_is(cls):
    assert issubclass(cls, errors.WeftError)
    assert inspect.getdoc(cls)
    assert str(cls("what went wrong")) == "what went wrong"
