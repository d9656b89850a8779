"""Settings for all tests."""

from __future__ import annotations

from hypothesis import settings

# A busy machine makes single examples slow, which says nothing about the code.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
