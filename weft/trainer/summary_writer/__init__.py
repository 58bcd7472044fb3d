"""Writers of a run's summaries: TensorBoard, JSON lines, Weights & Biases, MLflow."""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
