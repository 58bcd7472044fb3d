"""Loops and branches of Linen modules: the same programs on Flax and on Weft."""

import functools

import jax
import jax.numpy as jnp

from tests.keys import draw
from tests.parity.linen import KEY
from tests.parity.linen_transforms import (
    AXES,
    SPLIT,
    Programs,
    X,
    step,
)

programs = Programs()


@programs.body(jnp.arange(4.0), mutable=("counts",))
def scan_over_time(nn, self, x, xs):
    self.variable("counts", "calls", lambda: jnp.zeros(()))
    dense = nn.Dense(3)
    dense(x)

    def body(self, carry, x):
        calls = self.variable("counts", "calls")
        calls.value += x
        return nn.Dropout(0.5, deterministic=False)(carry) + x, calls.value

    if self.is_initializing():
        return x
    options = {"variable_carry": "counts", "split_rngs": {"dropout": True}}
    return nn.scan(body, **options)(self, dense(x), xs)


@programs.body(jnp.arange(4.0))
def scan_over_layers(nn, self, x, xs):
    return nn.scan(step(nn), AXES, split_rngs=SPLIT)()(x, xs)


@programs.body(jnp.arange(4.0))
def branches_in_a_scan_that_shares_parameters(nn, self, x, xs):
    class Step(nn.Module):
        @nn.compact
        def __call__(self, carry, x):
            dense = nn.Dense(3)
            carry = dense(carry)
            return nn.cond(x > 0, lambda m, c: m(c), lambda m, c: c, dense, carry), None

    shared = {"variable_broadcast": "params", "split_rngs": {"params": False}}
    return nn.scan(Step, **shared)()(x, xs)


@programs.body()
def scan_of_a_length(nn, self, x):
    return nn.scan(step(nn), AXES, split_rngs=SPLIT, length=3)()(x, None)


@programs.body(jnp.arange(8.0).reshape(2, 4))
def scan_along_other_axes_from_the_end(nn, self, x, xs):
    class Step(nn.Module):
        @nn.compact
        def __call__(self, carry, x, y):
            return nn.Dense(3)(carry) + x.sum() + y, x + carry.sum(-1)

    scanned = nn.scan(
        Step, {"params": 1}, split_rngs=SPLIT, in_axes=(1, nn.broadcast), out_axes=-1, reverse=True
    )
    return scanned()(x, xs, 2.0)


@programs.body()
def scan_unrolled(nn, self, x):
    return nn.scan(step(nn), AXES, split_rngs=SPLIT, length=4, unroll=2)()(x, None)


@programs.body()
def scan_with_axis_metadata(nn, self, x):
    kernel = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))

    class Step(nn.Module):
        @nn.compact
        def __call__(self, carry, _):
            return nn.Dense(3, kernel_init=kernel)(carry), None

    options = {"length": 3, "metadata_params": {nn.PARTITION_NAME: "layers"}}
    return nn.scan(Step, {"params": 1}, split_rngs=SPLIT, **options)()(x, None)


@programs.body(jnp.arange(4.0))
def scan_of_a_function(nn, self, x, xs):
    cell = nn.Dense(3)

    def body(cell, carry, x):
        return cell(carry) + x, carry

    scanned = nn.scan(body, variable_broadcast="params", split_rngs={"params": False})
    return scanned(cell, x, xs), cell(x)


@programs.program
def scan_as_decorator(nn):
    class Cell(nn.Module):
        features: int

        @functools.partial(
            nn.scan,
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=1,
            out_axes=1,
        )
        @nn.compact
        def __call__(self, h, x):
            h = nn.tanh(nn.Dense(self.features)(h) + nn.Dense(self.features)(x))
            return h, h

    return Cell(3).init_with_output(KEY, X, draw(3, 2, 5, 4))


@programs.body()
def remat_scan_of_a_class(nn, self, x):
    return nn.remat_scan(nn.Dense, lengths=(2, 3))(3)(x)


@programs.body()
def remat_scan_of_a_function(nn, self, x):
    f = nn.remat_scan(lambda self, x: nn.Dense(3, name="dense")(x), lengths=(2, 2))
    return f(self, x)


@programs.body(mutable=("counts",))
def while_loop_that_changes_state(nn, self, x):
    calls = self.variable("counts", "calls", lambda: 0)
    self.param("w", nn.initializers.ones, ())

    def on(self, carry):
        return self.get_variable("counts", "calls") < 3

    def body(self, carry):
        self.put_variable("counts", "calls", self.get_variable("counts", "calls") + 1)
        return carry * 2.0 * self.get_variable("params", "w")

    if self.is_initializing():
        return x
    return nn.while_loop(on, body, self, x, carry_variables="counts"), calls.value


@programs.body(mutable=("noise",))
def while_loop_with_keys(nn, self, x):
    def body(self, carry):
        n, y = carry
        return n + 1, y + jax.random.normal(self.make_rng("noise"), y.shape)

    init = 0, x
    return nn.while_loop(lambda m, c: c[0] < 3, body, self, init, split_rngs={"noise": True})


@programs.body(True)
def cond_of_submodules(nn, self, x, flag):
    one, other = nn.Dense(2), nn.Dense(2)
    one(x), other(x)
    return nn.cond(flag, lambda m, x: one(x), lambda m, x: other(x), self, x)


@programs.body()
def cond_whose_branches_sow(nn, self, x):
    def sows(self, x):
        self.sow("intermediates", "x", x)
        return x

    return nn.cond(x.sum() < 100, sows, lambda self, x: sows(self, 2 * x), self, x)


@programs.body(mutable=("counts",))
def cond_that_changes_state(nn, self, x):
    calls = self.variable("counts", "calls", lambda: jnp.zeros(()))

    def add(self, x):
        calls = self.variable("counts", "calls")
        calls.value += 2
        return x

    y = nn.cond(x.sum() < 100, add, lambda m, x: -x, self, x)
    return y, calls.value


@programs.program
def bound_methods(nn):
    class Model(nn.Module):
        def setup(self):
            self.dense = nn.Dense(3)

        def once(self, x):
            return self.dense(x)

        def twice(self, x):
            return self.dense(self.dense(x))

        def runs(self, carry):
            return carry[1] < 3

        def step(self, carry):
            return self.dense(carry[0]), carry[1] + 1

        def __call__(self, x):
            x = nn.cond(x[0, 0] > 0, self.once, self.twice, self, self.once(x))
            x = nn.switch(1, [self.once, self.twice], self, x)
            return nn.while_loop(self.runs, self.step, self, (x, 0))

    return Model().init_with_output(KEY, X)


test_variables_agree = programs.test()
