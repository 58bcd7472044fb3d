"""An encoder and a decoder read dates as people write them, and write them as ISO 8601.

`python examples/seq2seq.py` takes a minute on two cores. No day that it is tested on occurs in
training, so no answer can be looked up. What to look at: the model, its layers and the trainer
are configs, so `weft train examples/seq2seq.py:recipe dim=32` trains it too, with other settings.
The run is kept in `runs/seq2seq`, and a second call resumes it.
"""

import argparse
import datetime
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from weft import hierarchy, trainer
from weft.config import InstantiableConfig, config_for_function
from weft.hierarchy.causal_lm import gpt_decoder_config
from weft.input import ArrayInput, Arrays, Split, split_part

FORMATS = (
    "%A, %d %B %Y",
    "%b %d, %y",
    "%m/%d/%Y",
    "%d.%m.%y",
    "%a %d-%b-%Y",
    "day %j of %Y",
)
PAD, END, LETTERS, LONGEST = 0, 1, 128, 32


class EncoderDecoder(hierarchy.BaseModel):
    """Predicts a target text, letter by letter, from all of a source text."""

    class Config(hierarchy.BaseModel.Config):
        encoder: InstantiableConfig = (
            hierarchy.StackedTransformerLayer.default_config()
        )
        decoder: hierarchy.Decoder.Config = hierarchy.Decoder.default_config()
        metrics: InstantiableConfig = (
            hierarchy.CrossEntropyLossMetrics.default_config()
        )

    def __init__(self, cfg: Config, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child(
            "emb",
            cfg.decoder.emb.clone(dim=cfg.decoder.dim, vocab_size=LETTERS),
        )
        self._add_child("encoder", cfg.encoder.set(input_dim=cfg.decoder.dim))
        self._add_child("decoder", cfg.decoder)
        self._add_child("metrics", cfg.metrics)

    def forward(self, input_batch):
        """Returns the loss of the targets, each letter predicted from those before it."""
        target = input_batch["target"]
        before = jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=END)
        outputs = self.decoder(
            {"input_ids": before}, **self.encode(input_batch["source"])
        )
        batch = {"target_labels": target, "live_targets": _is_text(target)}
        loss, metrics = self.metrics(
            batch, predict_outputs=outputs, module_outputs={}
        )
        self.add_summary("loss", loss)
        self.add_summary("accuracy", metrics["accuracy"])
        return loss.mean, outputs

    def encode(self, source):
        """Returns the decoder's arguments for attention to the source, except its padding."""
        is_text = _is_text(source).astype(jnp.int32)
        x = self.encoder(
            self.emb({"inputs": source}), target_segment_ids=is_text
        ).data
        biases = jnp.where(is_text, 0.0, -1e9)[:, None, None]
        return {
            "cross_attention_data": x,
            "cross_attention_logit_biases": biases,
        }

    def translate(self, source):
        """Returns the likeliest targets, found by a search with four hypotheses."""
        prefix = jnp.full((len(source), 1), END)
        cross = self.encode(source)
        found = self.decoder.beam_search_decode(
            input_batch={"prefix": prefix},
            max_sequence_length=11,
            num_decodes=4,
            **cross,
        )
        return found.sequences[:, 0]


def _is_text(ids):
    """Returns which positions are a text or its end, the first END: padding follows."""
    is_end = ids == END
    return jnp.cumsum(is_end, axis=1) - is_end == 0


def as_ids(texts: list[str], length: int) -> np.ndarray:
    """The letters of each text, an end and padding."""
    padded = [
        text + chr(END) + chr(PAD) * (length - len(text) - 1) for text in texts
    ]
    return np.array([list(text.encode("ascii")) for text in padded], np.int32)


def pairs(split: Split) -> Arrays:
    """Days from 1950 to 2049 in one of the formats, and in ISO 8601; 2,000 days are held out."""
    chosen = split_part(
        np.arange(100 * 365), split, held_out=2000 / (100 * 365)
    )
    days = [
        datetime.date(1950, 1, 1) + datetime.timedelta(int(i)) for i in chosen
    ]
    sources = [
        day.strftime(FORMATS[i % len(FORMATS)]) for i, day in enumerate(days)
    ]
    targets = as_ids([day.isoformat() for day in days], 11)
    return Arrays({"source": as_ids(sources, LONGEST), "target": targets})


def recipe(
    steps: int = 1000, batch_size: int = 64, dim: int = 64
) -> trainer.SpmdTrainer.Config:
    """Returns the config of a run."""
    stack = hierarchy.RepeatedTransformerLayer.default_config()
    decoder = gpt_decoder_config(
        stack,
        2,
        dim,
        num_heads=4,
        vocab_size=LETTERS,
        max_position_embeddings=LONGEST,
    ).set(eos_token_id=END, pad_token_id=PAD)
    layer = decoder.transformer.layer
    assert isinstance(layer, hierarchy.TransformerLayer.Config)
    encoder_layer = layer.clone()
    # Each letter of a source sees all others.
    encoder_layer.self_attention.attention.mask = None
    encoder = decoder.transformer.clone(layer=encoder_layer)
    layer.cross_attention = hierarchy.TransformerAttentionLayer.default_config()
    layer.cross_attention.set(source_dim=dim).attention.num_heads = 4

    def data(split: Split) -> ArrayInput.Config:
        arrays = config_for_function(pairs).set(split=split)
        return ArrayInput.default_config().set(
            arrays=arrays, global_batch_size=batch_size
        )

    schedule = config_for_function(trainer.cosine_with_linear_warmup)
    optimizer = config_for_function(trainer.adamw_optimizer).set(
        learning_rate=schedule.set(peak_lr=3e-3, warmup_steps=0.05),
        b1=0.9,
        b2=0.95,
        eps=1e-8,
    )
    evaler = trainer.SpmdEvaler.default_config().set(
        input=data("held_out"),
        eval_policy=config_for_function(trainer.eval_every_n_steps_policy).set(
            n=500
        ),
    )
    save_policy = config_for_function(trainer.save_every_n_steps_policy).set(
        n=500
    )
    return trainer.SpmdTrainer.default_config().set(
        name="trainer",
        dir="runs/seq2seq",
        max_step=steps,
        model=EncoderDecoder.default_config().set(
            encoder=encoder, decoder=decoder
        ),
        input=data("train"),
        evalers={"held_out": evaler},
        checkpointer=trainer.Checkpointer.default_config().set(
            save_policy=save_policy
        ),
        learner=trainer.Learner.default_config().set(optimizer=optimizer),
        mesh_shape=(-1, 1),
        mesh_axis_names=("data", "model"),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, and prints how many held-out dates are right, by format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--dir", default="runs/seq2seq")
    args = parser.parse_args(argv)

    run = recipe(args.steps).set(dir=args.dir).instantiate(parent=None)
    run.run()
    translate = functools.partial(
        hierarchy.functional,
        run.model,
        None,
        method="translate",
        is_training=False,
    )
    held_out = {
        name: ids[:600] for name, ids in pairs("held_out").value.items()
    }
    found = np.asarray(
        jax.jit(translate)(run.trainer_state.model, [held_out["source"]])[0]
    )
    right = (found == held_out["target"]).all(1)
    for i, form in enumerate(FORMATS):
        texts = [
            "".join(map(chr, ids[ids > END]))
            for ids in (held_out["source"][i], found[i])
        ]
        share = right[i :: len(FORMATS)].mean()
        print(f"{form:14} {share:6.1%} right, such as {' -> '.join(texts)}")
    print(
        f"{right.mean():.1%} of the days are right; none of them occurs in training"
    )


if __name__ == "__main__":
    main()
