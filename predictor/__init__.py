"""Batch latency: features, models, what fits into a time, training, model files."""
