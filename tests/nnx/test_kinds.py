import pytest

from weft import nnx
from weft.errors import VariableTypeError


def test_kinds_have_the_names_of_collections():
    names = {
        "params": nnx.Param,
        "batch_stats": nnx.BatchStat,
        "cache": nnx.Cache,
        "intermediates": nnx.Intermediate,
        "perturbations": nnx.Perturbation,
    }
    for name, kind in names.items():
        assert nnx.variable_type_from_name(name) is kind
        assert nnx.variable_name_from_type(kind) == name


def test_new_names_and_kinds():
    made = nnx.variable_type_from_name("seen_tokens", base=nnx.Cache, allow_register=True)
    assert issubclass(made, nnx.Cache) and made.__name__ == "seen_tokens"
    assert nnx.variable_type_from_name("seen_tokens") is made

    class Mine(nnx.Variable):
        pass

    assert nnx.register_variable_name("mine", Mine) is Mine
    assert nnx.register_variable_name("mine", nnx.Param, overwrite=True) is nnx.Param

    class Other(nnx.Variable):
        pass

    assert nnx.variable_name_from_type(Other, allow_register=True) == "Other"
    assert nnx.variable_type_from_name("Other") is Other


def test_errors_about_names():
    class Unknown(nnx.Variable):
        pass

    with pytest.raises(VariableTypeError, match=r"has no name; give it one with nnx.register_var"):
        nnx.variable_name_from_type(Unknown)
    with pytest.raises(
        VariableTypeError, match="no kind of variable has the name 'nothing'; known"
    ):
        nnx.variable_type_from_name("nothing")
    with pytest.raises(VariableTypeError, match="'params' is already the name of Param"):
        nnx.register_variable_name("params", Unknown)
