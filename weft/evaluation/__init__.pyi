from weft.evaluation.evaluate import evaluate as evaluate
from weft.evaluation.lm_eval import LmEvalModel as LmEvalModel
from weft.evaluation.results import EvaluationResult as EvaluationResult
from weft.evaluation.scorer import Score as Score, Scorer as Scorer
