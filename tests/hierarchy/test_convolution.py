import inspect

from weft.hierarchy import convolution
from weft.hierarchy.base_layer import BaseLayer


def test_every_name_is_there_once_and_every_layer_can_be_configured():
    assert len(convolution.__all__) == len(set(convolution.__all__))
    for name in convolution.__all__:
        made = getattr(convolution, name)
        if inspect.isclass(made) and issubclass(made, BaseLayer):
            assert made.default_config().klass is made
