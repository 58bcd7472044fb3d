import weft.hierarchy.summary
from weft.trainer import summary


def test_the_trainers_summaries_are_those_of_the_layers():
    for name in summary.__all__:
        assert getattr(summary, name) is getattr(weft.hierarchy.summary, name)
