"""The recommended samplers: scaling, curvature, a bank of trackers and a calibrated predictive, put together."""
