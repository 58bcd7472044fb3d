"""XLA's analysis of a compiled step."""

import jax


def aot_model_analysis(compiled: jax.stages.Compiled) -> str:
    """Returns memory by purpose and floating-point operations of a compiled step.

    Args:
        compiled: from `SpmdTrainer.compile_train_step`.
    """
    lines = []
    memory = compiled.memory_analysis()
    for name in ("argument", "output", "temp", "alias", "generated_code"):
        size = getattr(memory, f"{name}_size_in_bytes", None)
        if size is not None:
            lines.append(f"{name.replace('_', ' ')}: {size / 2**20:.1f} MiB")
    cost = compiled.cost_analysis() or {}
    if "flops" in cost:
        lines.append(f"floating-point operations: {cost['flops']:.3e}")
    return "\n".join(lines)
