from weft.metrics.classification import (
    Accuracy as Accuracy, Average as Average, ConfusionMatrix as ConfusionMatrix,
    F1Score as F1Score, Perplexity as Perplexity, Precision as Precision, Recall as Recall,
)
from weft.metrics.metric import Metric as Metric
from weft.metrics.rows import AllRows as AllRows, AUC as AUC
