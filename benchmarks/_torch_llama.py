"""The Llama of `_llama` in PyTorch: bfloat16 products, float32 parameters, and fused attention."""

import time
from typing import Any


def step_seconds(
    settings: dict[str, Any], *, batch: int, length: int, device: str, steps: int, blocks: int
) -> list[float]:
    """Returns the time of a training step, for each block of steps after a first one.

    Args:
        settings: Those of a Hugging Face Llama.
    """
    import torch

    fn = torch.nn.functional
    dim, hidden = settings["hidden_size"], settings["intermediate_size"]
    heads, groups = settings["num_attention_heads"], settings["num_key_value_heads"]
    size, vocab = dim // heads, settings["vocab_size"]

    def weight(*shape: int) -> torch.Tensor:
        x = torch.randn(shape, device=device) / shape[0] ** 0.5
        return x.requires_grad_()

    embedding, last_norm = weight(vocab, dim), torch.ones(dim, device=device, requires_grad=True)
    layers = [
        {
            "norm1": torch.ones(dim, device=device, requires_grad=True),
            "norm2": torch.ones(dim, device=device, requires_grad=True),
            "qkv": weight(dim, (heads + 2 * groups) * size),
            "out": weight(dim, dim),
            "up": weight(dim, 2 * hidden),
            "down": weight(hidden, dim),
        }
        for _ in range(settings["num_hidden_layers"])
    ]
    weights = [embedding, last_norm, *(w for layer in layers for w in layer.values())]
    optimizer = torch.optim.AdamW(weights, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    positions = torch.arange(length, device=device)[:, None]
    angle = positions * settings["rope_theta"] ** (-torch.arange(0, size, 2, device=device) / size)
    cos, sin = (torch.cat([x, x], -1).bfloat16() for x in (angle.cos(), angle.sin()))

    def rotate(x: torch.Tensor) -> torch.Tensor:
        half = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1)
        return x * cos + half * sin

    def forward(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            x = fn.embedding(ids, embedding).bfloat16()
            for w in layers:
                h = fn.rms_norm(x, (dim,), w["norm1"].bfloat16(), 1e-5) @ w["qkv"]
                parts = h.view(batch, length, -1, size).transpose(1, 2)
                q, k, v = parts.split([heads, groups, groups], 1)
                y = fn.scaled_dot_product_attention(
                    rotate(q), rotate(k), v, is_causal=True, enable_gqa=True
                )
                x = x + y.transpose(1, 2).flatten(2) @ w["out"]
                h = fn.rms_norm(x, (dim,), w["norm2"].bfloat16(), 1e-5) @ w["up"]
                gate, up = h.chunk(2, -1)
                x = x + (fn.silu(gate) * up) @ w["down"]
            logits = fn.rms_norm(x, (dim,), last_norm.bfloat16(), 1e-5) @ embedding.T
        return fn.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    loss_fn = torch.compile(forward)
    ids = torch.randint(vocab, (batch, length + 1), device=device)
    seconds = []
    for _ in range(blocks + 1):
        start = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            loss_fn(ids[:, :-1], ids[:, 1:]).backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
        weights[0].flatten()[0].item()  # waits for the device
        seconds.append((time.perf_counter() - start) / steps)
    return seconds[1:]
