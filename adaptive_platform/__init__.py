"""Adaptive Platform: elastic, adaptive-batch training on Ray."""
