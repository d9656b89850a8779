"""What each worker has of its own and a checkpoint holds of all of them: one interface."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["OwnPart"]


class OwnPart(Protocol):
    """Differs between workers, unlike model, optimizer and `RunState`.

    Saving is collective: every worker's share is gathered, in rank order, on rank 0 at least.
    """

    def state_dict(self) -> Any:
        """For a checkpoint, of plain containers and tensors. All workers take part.

        None where there is nothing to keep.
        """

    def load(self, saved: Any) -> list[str]:
        """Go on from `state_dict`, with as many workers as then or with another number.

        Args:
            saved: None where the checkpoint holds nothing of this part.

        Returns:
            What people should know.
        """
