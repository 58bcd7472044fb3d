from weft.hierarchy import mixture_of_experts


def test_all_names_are_there():
    assert all(hasattr(mixture_of_experts, name) for name in mixture_of_experts.__all__)
