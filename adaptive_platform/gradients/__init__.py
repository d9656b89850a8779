"""Forward and backward: losses as sums, precision, flat buckets and their norms."""
