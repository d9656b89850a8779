"""Adds the recipes of `experiments/` to the package; everything else stands in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["adaptive_platform*"]), "adaptive_platform.recipes"],
    package_dir={"adaptive_platform.recipes": "experiments/recipes"},
    package_data={"adaptive_platform": ["py.typed"], "adaptive_platform.recipes": ["*.yaml"]},
)
