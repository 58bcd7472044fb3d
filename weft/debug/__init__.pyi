from weft.debug.anomalies import AnomalyPolicy as AnomalyPolicy
