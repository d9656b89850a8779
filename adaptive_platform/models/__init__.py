"""Networks by name, and the normalization policies that a moving batch needs."""
