"""Sweeps: many runs of one recipe with some of its fields chosen by Ray Tune."""
