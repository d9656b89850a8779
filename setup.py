"""Adds what ships in `experiments/` to the package; everything else stands in pyproject.toml."""

from setuptools import find_packages, setup

SHIPPED = {
    "adaptive_platform.recipes": "experiments/recipes",
    "adaptive_platform.shipped_sweeps": "experiments/sweeps",
}

setup(
    packages=[*find_packages(include=["adaptive_platform*"]), *SHIPPED],
    package_dir=SHIPPED,
    package_data={"adaptive_platform": ["py.typed"], **{name: ["*.yaml"] for name in SHIPPED}},
)
