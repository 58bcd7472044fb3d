"""Functions of logits that control sampling: temperature, top-k, top-p, and chains of these.

As a config: `config_for_function(top_k_logits).set(k=40)`; see `Decoder.sample_decode`.
"""

from weft.functional.sampling import LogitsToLogitsFn, chain, scale_by, top_k_logits, top_p_logits

__all__ = ["LogitsToLogitsFn", "chain", "scale_by", "top_k_logits", "top_p_logits"]
