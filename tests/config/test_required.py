import copy
import pickle
from typing import Union, get_args

import pytest

from weft.config import REQUIRED, Required, RequiredFieldMissingError, RequiredFieldValue


def test_there_is_only_one():
    assert RequiredFieldValue() is REQUIRED
    assert copy.copy(REQUIRED) is REQUIRED
    assert copy.deepcopy([REQUIRED])[0] is REQUIRED
    assert pickle.loads(pickle.dumps(REQUIRED)) is REQUIRED


def test_it_is_false_and_says_what_it_is():
    assert not REQUIRED
    assert repr(REQUIRED) == "REQUIRED"


def test_required_is_a_union():
    assert Required[int] == Union[int, RequiredFieldValue]  # noqa: UP007 - what it promises
    assert int in get_args(Required[int | str])


def test_calling_it_says_what_is_missing():
    with pytest.raises(RequiredFieldMissingError, match="still REQUIRED was called as a function"):
        REQUIRED(1, x=2)
