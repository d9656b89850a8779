"""Optimizers, parameter groups, and schedules as pure functions of progress."""
