"""One committed step, the loop around it, precision, evaluation and checkpoints."""
