import inspect

import pytest

from weft import errors

CLASSES = [c for c in vars(errors).values() if inspect.isclass(c)]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_every_error_is_a_weft_error_that_says_what_it_is(cls):
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
