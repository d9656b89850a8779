"""Batch controllers and learning-rate rules: summaries and limits in, decisions out."""
