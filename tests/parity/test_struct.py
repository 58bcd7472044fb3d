"""The same programs on weft.struct and flax.struct."""

import copy
import dataclasses
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
import pytest

from weft import struct as weft_struct

flax_struct = pytest.importorskip("flax.struct")
T = TypeVar("T")
both = pytest.mark.parametrize("struct", [weft_struct, flax_struct], ids=["weft", "flax"])


def fields_and_replace(struct):
    @struct.dataclass
    class A:
        x: Any
        y: Any = struct.field(pytree_node=False, default=3)

        def twice(self):
            return 2 * self.x

    @struct.dataclass
    class B(A):
        z: Any = 5

    a = A(1)
    yield a, a.replace(x=2), a == A(1), hash(a) == hash(A(1)), a.twice(), copy.deepcopy(a)
    yield B(1), B(1, z=2).replace(y=0), struct.dataclass(A) is A
    yield A.__match_args__, A.__dataclass_params__, dataclasses.asdict(B(1))
    yield str(jax.tree.structure(B({"q": 1}))), jax.tree_util.tree_leaves_with_path(B({"q": 1}))
    yield (jax.jit(lambda b: b.replace(x=b.x + 1))(B(jnp.ones(()))),)
    yield (jax.eval_shape(lambda b: b, A(jnp.ones(2))),)


def bases(struct):
    class P(struct.PyTreeNode):
        x: Any
        y: Any = struct.field(pytree_node=False, default=3)

    class KwOnly(P, kw_only=True):
        w: Any

    class Below(KwOnly):
        v: Any = 4

    class Typed(struct.PyTreeNode, Generic[T]):
        x: T
        k: ClassVar[int] = 3
        i: dataclasses.InitVar[int] = 3

    class Plain(P):
        def method(self):
            return self.x

    yield P(1), KwOnly(1, w=2), Below(1, w=2), Below(1, w=2).replace(w=3), Typed[int](1)
    for made in (P(1), KwOnly(1, w=2), Below(1, w=2), Typed(1), Plain(1)):
        yield jax.tree.leaves(made), str(jax.tree.structure(made))
    yield dataclasses.is_dataclass(struct.PyTreeNode), Plain(1).method(), jax.tree.map(str, P(1))


def options(struct):
    @struct.dataclass(frozen=False)
    class Mutable:
        x: Any

    @struct.dataclass(eq=False)
    class ByIdentity:
        x: Any

    @struct.dataclass(kw_only=True, slots=True)
    class Slots:
        x: Any = 1
        y: Any

    class MutableNode(struct.PyTreeNode, frozen=False):
        x: Any

    class Undecorated:
        x: int = 1

    for made in (Mutable(1), MutableNode(1)):
        made.x = 2
        yield made, jax.tree.leaves(made)
    yield ByIdentity(1) == ByIdentity(1), Slots(y=2), jax.tree.leaves(Slots(y=2))
    yield (struct.dataclass(clz=Undecorated)(),)
    for field in (
        struct.field(metadata={"a": 1}),
        struct.field(False, metadata=None, default=1),
        struct.field(metadata={"pytree_node": False}),
        struct.field(default_factory=list),
    ):
        yield dict(field.metadata), field.default_factory is list


@pytest.mark.parametrize("program", [fields_and_replace, bases, options])
def test_programs_agree(program):
    of_weft = [[repr(x) for x in seen] for seen in program(weft_struct)]
    assert of_weft == [[repr(x) for x in seen] for seen in program(flax_struct)]


@both
def test_error_classes_agree(struct):
    class P(struct.PyTreeNode):
        x: Any

    with pytest.raises(dataclasses.FrozenInstanceError, match="'x'"):
        P(1).x = 2
    with pytest.raises(dataclasses.FrozenInstanceError, match="'x'"):
        del P(1).x
    for call in (
        lambda: P(1).replace(z=1),
        lambda: P(1).replace(2),
        lambda: P(),
        lambda: hash(P([1])),
        lambda: type("Unknown", (struct.PyTreeNode,), {}, unknown=1),
        lambda: struct.dataclass(unknown=1)(type("Unknown", (), {})),
    ):
        with pytest.raises(TypeError):
            call()
    with pytest.raises(NotImplementedError):
        struct.PyTreeNode()
