"""Checkpoints that appear whole or not at all, on any pyarrow file system."""
