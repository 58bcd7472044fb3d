import inspect

from weft import hierarchy
from weft.hierarchy.base_layer import BaseLayer


def test_every_layer_can_be_configured():
    for name in hierarchy.__all__:
        made = getattr(hierarchy, name)
        if inspect.isclass(made) and issubclass(made, BaseLayer):
            assert made.default_config().klass is made
