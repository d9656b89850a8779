"""One factor's sum on one worker in one step: its rows while they are few, then their product."""

from __future__ import annotations

import torch
from torch import Tensor

from adaptive_platform.optimizers.natural.factor_forms import widened

__all__ = ["Collected"]


class Collected:
    """Sums add up over micro-batches, whatever their sizes; rows are kept one below the other."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._product: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Rows held."""
        return sum(len(rows) for rows in self._rows)

    @property
    def is_product(self) -> bool:
        """Rows were given up for their product."""
        return self._product is not None

    def add_rows(self, rows: Tensor) -> None:
        """Add rows `[n, side]`; only before any product."""
        self._rows.append(rows)

    def add_product(self, product: Tensor) -> None:
        """Add a product; from now on this is one, too."""
        self.to_product()
        self._product = product if self._product is None else self._product.add_(product)

    def to_product(self) -> None:
        """Give up the rows for their product."""
        held, self._rows = self._rows, []
        if held:
            rows = torch.cat(held)
            self.add_product(rows.T @ rows)

    def widen(self, places: Tensor, side: int) -> None:
        """Let `side` columns be, of which those so far are at `places`."""
        wide = []
        for rows in self._rows:
            wide.append(rows.new_zeros(len(rows), side))
            wide[-1][:, places] = rows
        self._rows = wide
        if self._product is not None:
            self._product = widened(self._product, places, side)

    @property
    def rows(self) -> Tensor | None:
        """All rows `[n, side]`; None where there are none."""
        return torch.cat(self._rows) if self._rows else None

    @property
    def product(self) -> Tensor | None:
        """The product; None where nothing was added, or only rows."""
        return self._product

    def clear(self) -> None:
        """Forget everything."""
        self._rows, self._product = [], None
