"""Rules for axis names, by kind of array.

A model names the axes of its parameters and activations once. Each kind of array may map a name to
a different mesh axis, for example to shard the optimizer state of replicated parameters. Gradients
and the learner's state take their names from the parameters.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from weft.config import Configurable, config_class
from weft.core.axis_rules import Rules, checked_rules

AxisRules = Sequence[tuple[str, str | Sequence[str] | None]]


class RulesByKind(Configurable):
    """Axis rules for one kind of array, which take precedence over those for all kinds.

    Example:
        >>> cfg = RulesByKind.default_config().set(parameters=[("fsdp", None)])
        >>> cfg.instantiate().with_all([("fsdp", "data"), ("mlp", "model")]).parameters
        (('fsdp', None), ('mlp', 'model'))
    """

    @config_class
    class Config(Configurable.Config):
        """Configures a RulesByKind with pairs of a name and the mesh axis or axes for it, or None.

        Attributes:
            parameters: for the model's parameters and other state.
            optimizer: for the learner's state, including moving averages of parameters.
            gradients: for gradients, as they leave the backward pass.
            activations: for layouts that the model sets inside its computation.
        """

        parameters: AxisRules = []
        optimizer: AxisRules = []
        gradients: AxisRules = []
        activations: AxisRules = []

    def with_all(self, rules: AxisRules) -> "KindRules":
        """Returns the rules of each kind, with those for all where a name has none.

        Raises a LogicalAxisError if rules are malformed.
        """
        return KindRules(
            **{kind: _before(getattr(self.config, kind), rules) for kind in KindRules._fields}
        )


class KindRules(NamedTuple):
    """Complete rules of each kind, with the fields of `RulesByKind.Config`."""

    parameters: Rules = ()
    optimizer: Rules = ()
    gradients: Rules = ()
    activations: Rules = ()


def rules_of(cfg: Any) -> KindRules:
    """Returns the rules from a config's `logical_axis_rules` and `rules_by_kind`."""
    return cfg.rules_by_kind.instantiate().with_all(cfg.logical_axis_rules)


def _before(own: AxisRules, rules: AxisRules) -> Rules:
    first = checked_rules(own)
    known = {name for name, _ in first}
    return first + tuple(rule for rule in checked_rules(rules) if rule[0] not in known)
