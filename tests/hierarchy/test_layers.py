import inspect

from weft.hierarchy import layers
from weft.hierarchy.base_layer import BaseLayer


def test_every_name_is_there_once_and_every_layer_can_be_configured():
    assert len(layers.__all__) == len(set(layers.__all__))
    for name in layers.__all__:
        made = getattr(layers, name)
        if inspect.isclass(made) and issubclass(made, BaseLayer):
            assert made.default_config().klass is made
