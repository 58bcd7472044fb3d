"""A trainer refuses ids and positions that a table of its model lacks, before the first step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.debug.test_token_checks import with_wide_tokenizer
from weft import functional
from weft.cli.configs import load_config
from weft.config import config_for_class
from weft.debug.anomalies import AnomalyPolicy
from weft.debug.lookup_checks import _Frame, check_lookups
from weft.errors import InputDatasetError, TokenizerError
from weft.recipes.lm_nnx import LanguageModel
from weft.trainer.train_step import TrainerState

CFG = load_config("lm-tiny")
ROWS = 8
IDS = np.array([[1, 2, 7, 3], [0, 1, 2, 9]], np.int32)


def check(fn, ids=IDS, rows=ROWS, **fields):
    """Checks a function of a table and a batch as the step of a trainer."""
    state = TrainerState(jax.random.key(0), {"emb": jnp.ones((rows, 4))}, {"count": jnp.int32(0)})
    batch = {"ids": jnp.asarray(ids), **fields}

    def step(state, batch):
        loss = jax.checkpoint(lambda table: fn(table, batch["ids"]).sum())
        return jax.value_and_grad(loss)(state.model["emb"].astype(jnp.bfloat16))

    check_lookups(jax.make_jaxpr(step)(state, batch), state, batch, CFG)


@jax.jit
def indexed(table, ids):
    return table[ids]


def in_microbatches(table, ids):
    _, rows = jax.lax.scan(lambda carry, ids: (carry, table[ids]), 0, ids[:, None])
    return rows


@pytest.mark.parametrize(
    "fn",
    [
        functional.lookup,
        indexed,
        in_microbatches,
        lambda table, ids: jnp.take(table, ids, axis=0),
        lambda table, ids: table[ids, 0],
        lambda table, ids: table[jnp.pad(ids[:, 1:], ((0, 0), (1, 0)))],
        lambda table, ids: jax.vmap(lambda row: table[row])(ids),
        lambda table, ids: table[ids + 1][:1],
    ],
    ids=["lookup", "index", "scan", "take", "two axes", "shifted", "vmap", "offset"],
)
def test_ids_outside_of_a_table(fn):
    with pytest.raises(InputDatasetError) as raised:
        check(fn)
    assert str(raised.value) == (
        "the batch has ids in ids from 0 to 9, and the model looks them up in the parameter emb, "
        "which has 8 rows, shape (8, 4). Give the table more rows, or the input ids from 0 to 7."
    )
    check(fn, ids=np.minimum(IDS, 6))


@pytest.mark.parametrize(
    "fn",
    [
        lambda table, ids: table[ids[:, :-1]],
        lambda table, ids: table[ids % ROWS],
        lambda table, ids: table[jnp.where(ids < ROWS, ids, 0)],
        lambda table, ids: jnp.take(table, ids, axis=0, mode="clip"),
        lambda table, ids: table[ids - 8],  # from the end
        lambda table, ids: jax.lax.cond(
            ids.max() < ROWS, lambda: table[ids], lambda: jnp.zeros((*ids.shape, 4), table.dtype)
        ),
        lambda table, ids: jax.nn.one_hot(ids, ROWS) @ table,
        lambda table, ids: jnp.sort(table[:, 0])[ids],
    ],
    ids=["sliced", "modulo", "replaced", "clip", "negative", "cond", "one-hot", "no table"],
)
def test_lookups_that_are_meant(fn):
    check(fn)


def test_positions_after_a_table():
    def positions(table, ids):
        return table[jnp.arange(ids.shape[1])]

    long = np.zeros((2, 12), np.int32)
    match = (
        r"positions from 0 to 11 in the parameter emb, which has 8 rows, shape \(8, 4\). The batch "
        r"has ids of shape \(2, 12\). Give the table 12 rows, or set "
        r"input.source.sequence_length=8."
    )
    with pytest.raises(InputDatasetError, match=match):
        check(positions, ids=long)
    check(positions)


class SizedModel(LanguageModel):
    """Model of a user, whose config has no `vocab_size`."""

    def __init__(self, rows: int, *, rngs):
        shape = {"dim": 8, "num_layers": 1, "num_heads": 2, "hidden_dim": 8, "window": 7}
        super().__init__(vocab_size=rows, **shape, rngs=rngs)


def own_config(folder, rows):
    words = [f"dir={folder}", "batch_size=8", "input.source.sequence_length=8"]
    return load_config("lm-nnx", words).set(model=config_for_class(SizedModel).set(rows=rows))


def test_own_model_with_too_few_rows(tmp_path):
    cfg = own_config(tmp_path, rows=50).set(anomaly_policy=AnomalyPolicy.default_config())
    cfg.evalers = {}
    with pytest.raises(InputDatasetError, match=r"input_ids from \d+ to .*embed/embedding, which"):
        cfg.instantiate(parent=None).run(progress=False)


def test_own_model_for_another_tokenizer(tmp_path):
    cfg = with_wide_tokenizer(own_config(tmp_path, rows=264))
    match = (
        "the tokenizer of input.source.tokenizer does not fit the model: it has 1258 ids, and the "
        "model looks them up in the parameter params/embed/embedding, which has 264 rows"
    )
    with pytest.raises(TokenizerError, match=match):
        cfg.instantiate(parent=None).compile_train_step()


def test_activations_are_not_computed():
    # Zeros of the size of a batch's hidden states took the host's memory.
    program = jax.make_jaxpr(lambda: jnp.zeros((2**20, 2**20), jnp.int32) + 1)()
    frame = _Frame(program.jaxpr, [], program.consts)
    assert frame.argument(program.jaxpr.outvars[0]).value is None
