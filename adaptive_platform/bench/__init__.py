"""Benchmarks: ours and the baseline in turn, in one run, as ratios of medians."""
