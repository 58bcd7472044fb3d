"""Fine-tuning of a checkpoint of transformers on conversations, from the file to PEFT and back."""

import io
import json
import os
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import weft
from weft.cli import main
from weft.cli.configs import run_config
from weft.cli.trained_models import restore_model
from weft.errors import FitError, FrozenBaseError, LayerConfigError, StateBuilderError
from weft.hierarchy import causal_lm
from weft.hierarchy.module import functional
from weft.interop.huggingface import from_huggingface, from_peft, to_peft
from weft.recipes.sft import sft
from weft.trainer import UpdateType, read_params
from weft.trainer.frozen_base import merged_with_base

pytestmark = [
    pytest.mark.usefixtures("one_device"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"What is {a} plus {b}?"},
            {"role": "assistant", "content": f"It is {a + b}."},
        ]
    }
    for a in range(5)
    for b in range(5)
]
SHORT = {"sequence_length": 48, "batch_size": 4, "held_out": 0.2}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Returns the folder of a Llama of transformers, with a tokenizer and a chat template."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    with warnings.catch_warnings():
        for kind in (DeprecationWarning, FutureWarning, UserWarning):
            warnings.simplefilter("ignore", kind)
        pytest.importorskip("peft", reason="needs the extra parity, which is for Python 3.11")
        import tokenizers
        import torch
        import transformers
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([m["content"] for row in ROWS for m in row["messages"]], trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=280,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():  # large enough to learn from a frozen base
        torch.nn.init.normal_(parameter, mean=0.1, std=0.3)
    folder = tmp_path_factory.mktemp("models") / "base"
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return path


def torch_logits(model, ids):
    import torch

    with torch.no_grad():
        return model(torch.tensor(ids)).logits.numpy()


def weft_logits(cfg, params, ids):
    model = cfg.clone(name="model", compute_dtype=None).instantiate(parent=None)
    inputs = {"input_batch": {"input_ids": jnp.asarray(ids)}}
    call = jax.jit(
        lambda params: functional(
            model, None, params, inputs, method="extract_logits", is_training=False
        )[0]
    )
    return call(params)


def test_journey_of_adapters_from_a_file_to_peft(base, data, tmp_path, monkeypatch, capsys):
    import peft
    import transformers

    monkeypatch.chdir(tmp_path)
    words = [f"base={base}", f"data={data}", "rank=4", "steps=15", "learning_rate=0.03"]
    words += ["sequence_length=48", "batch_size=4", "held_out=0.2", "mesh_shape=1,1"]
    assert main(["train", "sft", *words]) == 0
    assert "parameters, 1,856 of them trained" in capsys.readouterr().out
    whole = read_params("runs/sft-chat").params
    # A checkpoint has the adapters, and says which base they belong to.
    checkpoints = tmp_path / "runs/sft-chat/checkpoints"
    index = (checkpoints / "step_00000015/index").read_text(encoding="utf-8")
    assert "adapter" in index and "token_emb" not in index
    # Continued from an earlier step, a run ends with the same bits.
    shutil.rmtree(checkpoints / "step_00000015")
    assert main(["train", "sft", *words]) == 0
    assert "step 12" in capsys.readouterr().out
    jax.tree.map(np.testing.assert_array_equal, read_params("runs/sft-chat").params, whole)
    # The held-out loss falls.
    lines = (tmp_path / "runs/sft-chat/summaries/held_out").glob("*.jsonl")
    records = [json.loads(x) for p in lines for x in p.read_text(encoding="utf-8").splitlines()]
    losses = [r["values"]["loss"] for r in records if "loss" in r.get("values", {})]
    assert losses[-1] < losses[0] - 0.2
    samples = json.loads((tmp_path / "runs/sft-chat/run.json").read_text(encoding="utf-8"))[
        "samples"
    ]
    assert any("What is" in sample["prompt"] for sample in samples)

    # Exported, PEFT computes the same as Weft, and transformers with the merged weights.
    assert main(["export", "runs/sft-chat", "--to", "adapter"]) == 0
    assert main(["export", "runs/sft-chat", "--to", "merged", "--merge"]) == 0
    ids = np.random.RandomState(0).randint(3, 270, (2, 12))
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    expected = torch_logits(adapted, ids)
    cfg, params = from_peft("adapter", *from_huggingface(base), base=base)
    np.testing.assert_allclose(weft_logits(cfg, params, ids), expected, atol=1e-4)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    np.testing.assert_allclose(torch_logits(merged, ids), expected, atol=1e-4)
    assert merged.config.max_position_embeddings == 64

    # A base that has moved is found, and another one refused.
    moved = tmp_path / "moved"
    shutil.copytree(base, moved)
    os.rename(base, f"{base}-away")
    try:
        with pytest.raises(FrozenBaseError, match=r"there is no .*base', .* WEFT_BASE"):
            read_params("runs/sft-chat")
        monkeypatch.setenv("WEFT_BASE", str(moved))
        jax.tree.map(np.testing.assert_array_equal, read_params("runs/sft-chat").params, whole)
        (moved / "config.json").write_text("{}", encoding="utf-8")
        with pytest.raises(FrozenBaseError, match=r"is not the one that .* SHA-256"):
            read_params("runs/sft-chat")
    finally:
        os.rename(f"{base}-away", base)


@pytest.mark.long
@pytest.mark.parametrize("tuning", ["lora-nf4", "full"])
def test_chat_with_a_tuned_model(base, data, tmp_path, monkeypatch, capsys, tuning):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(base, "base")
    words = ["base=base", f"data={data}", f"tuning={tuning}", "rank=4", "steps=2", "held_out=0"]
    assert main(["train", "sft", *words, "sequence_length=48", "batch_size=4"]) == 0
    output = capsys.readouterr().out
    assert "chat runs/sft-chat" in output and "Unprompted text" not in output

    def shown(*words):
        monkeypatch.setattr("sys.stdin", io.StringIO("What is 1 plus 2?\n"))
        capsys.readouterr()
        code = main([*words, "--tokens", "6", "--temperature", "0"])
        output = capsys.readouterr()
        return code, output.out, output.err

    answer = shown("chat", "runs/sft-chat")
    assert answer[0] == 0 and answer[1].strip() and "tokens/s" in answer[2]
    # As a prompt that spells the markers of the template.
    prompt = "<|im_start|>user\nWhat is 1 plus 2?<|im_end|>\n<|im_start|>assistant\n"
    sample = shown("sample", "runs/sft-chat", "--prompt", prompt)
    assert sample[0] == 0 and sample[1].strip().endswith(answer[1].strip())
    # The base has the template, and is not in the run.
    os.rename("base", "moved")
    for command in ("chat", "sample"):
        code, _, error = shown(command, "runs/sft-chat")
        assert code == 2
        assert "there is no 'base', the base that" in error and "WEFT_BASE" in error
    monkeypatch.setenv("WEFT_BASE", "moved")
    assert shown("chat", "runs/sft-chat")[:2] == answer[:2]
    with pytest.raises(FrozenBaseError, match=r"WEFT_BASE names 'moved', and the base of the run"):
        sft(str(base), str(data))


def test_full_tuning_in_python(base):
    result = weft.finetune(
        str(base), ROWS, tuning="full", steps=6, learning_rate=0.02, progress=False, **SHORT
    )
    losses = result.history.validation["loss"]
    assert losses[-1] < losses[0] - 0.2
    assert result.best.variables["decoder"]["emb"]["token_emb"]["weight"].shape == (280, 16)


def test_adapters_on_a_quantized_base(base, data, tmp_path):
    result = weft.finetune(
        str(base),
        str(data),
        tuning="lora-nf4",
        rank=4,
        targets=["q_proj", "v_proj", "down_proj"],
        steps=6,
        learning_rate=0.03,
        dir=str(tmp_path / "run"),
        progress=False,
        **SHORT,
    )
    losses = result.history.validation["loss"]
    assert losses[-1] < losses[0]
    params = result.last.variables
    linear = params["decoder"]["transformer"]["repeat"]["layer"]["feed_forward"]
    assert linear["linear1_0"].keys() == {"weight_codes", "weight_scales"}
    assert isinstance(result.config.model, causal_lm.Model.Config)
    files = to_peft(tmp_path, result.config.model, params, base=base)
    values = json.loads(files[0].read_text(encoding="utf-8"))
    assert values["target_modules"] == ["down_proj", "q_proj", "v_proj"]
    assert (values["r"], values["lora_alpha"]) == (4, 8)
    # The run can be read again, with its base from the folder.
    _, restored = restore_model(run_config(str(tmp_path / "run")))
    jax.tree.map(np.testing.assert_array_equal, restored, params)
    cfg, merged = merged_with_base(result.config.model, params, str(base))
    assert cfg.dtype == "float32" and "weight_codes" not in str(jax.tree.structure(merged))


def test_wrong_arguments(base, data):
    for targets, message in (
        ("q_proj,gate_proj", r"one of gate_proj and up_proj"),
        ("query", r"no linear map 'query'"),
    ):
        with pytest.raises(LayerConfigError, match=message):
            sft(str(base), str(data), targets=targets, sequence_length=48)
    with pytest.raises(FitError, match=r"finetune got steps=0"):
        weft.finetune(str(base), ROWS, steps=0)
    with pytest.raises(FitError, match=r"fresh=True.*resume=True"):
        weft.finetune(str(base), ROWS, fresh=True, resume=True)
    cfg = sft(str(base), str(data), sequence_length=48).set(dir="unused", mesh_shape=(1, 1))
    cfg.learner.update_rules = [(".*", UpdateType.ALL_UPDATES)]
    with pytest.raises(StateBuilderError, match=r"not trained, but .* is, so checkpoints"):
        cfg.instantiate(parent=None, devices=jax.devices()[:1])
