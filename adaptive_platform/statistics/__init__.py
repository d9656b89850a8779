"""Estimators: squared norms and counts in, GradientSummary out."""
