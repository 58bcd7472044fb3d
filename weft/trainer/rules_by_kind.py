"""Rules for axis names, by the kind of array that is laid out.

A model names the axes of its parameters and activations once. What a name stands for may be another
thing for each kind: parameters that every device holds whole, with optimizer state that is split,
and so on. Gradients and the learner's state take their names from the parameters.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from weft.config import Configurable, config_class
from weft.core.axis_rules import Rules, checked_rules

AxisRules = Sequence[tuple[str, str | Sequence[str] | None]]


class RulesByKind(Configurable):
    """Rules that hold for one kind of array, before those that hold for all.

    Example:
        >>> cfg = RulesByKind.default_config().set(parameters=[("fsdp", None)])
        >>> cfg.instantiate().with_all([("fsdp", "data"), ("mlp", "model")]).parameters
        (('fsdp', None), ('mlp', 'model'))
    """

    @config_class
    class Config(Configurable.Config):
        """Configures a RulesByKind.

        Each field has pairs of a name and the mesh axis or axes that it stands for, None for none.

        Attributes:
            parameters: for the model's parameters and other state.
            optimizer: for the learner's state, moving averages of the parameters among it.
            gradients: for gradients, where they leave the backward pass.
            activations: for what the model lays out while it runs.
        """

        parameters: AxisRules = []
        optimizer: AxisRules = []
        gradients: AxisRules = []
        activations: AxisRules = []

    def with_all(self, rules: AxisRules) -> "KindRules":
        """The rules of each kind.

        Args:
            rules: for all kinds; a name that a kind has rules for has these alone.

        Raises:
            LogicalAxisError: if rules are not of the form above.
        """
        return KindRules(
            **{kind: _before(getattr(self.config, kind), rules) for kind in KindRules._fields}
        )


class KindRules(NamedTuple):
    """The rules of each kind, complete; the fields are those of `RulesByKind.Config`."""

    parameters: Rules = ()
    optimizer: Rules = ()
    gradients: Rules = ()
    activations: Rules = ()


def rules_of(cfg: Any) -> KindRules:
    """The rules of each kind that a trainer's config says.

    Args:
        cfg: with the fields `logical_axis_rules` and `rules_by_kind`.
    """
    return cfg.rules_by_kind.instantiate().with_all(cfg.logical_axis_rules)


def _before(own: AxisRules, rules: AxisRules) -> Rules:
    first = checked_rules(own)
    known = {name for name, _ in first}
    return first + tuple(rule for rule in checked_rules(rules) if rule[0] not in known)
