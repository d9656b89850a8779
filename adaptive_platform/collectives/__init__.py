"""Reductions: plans as data, process groups that can be rebuilt, executors."""
