"""From (seed, epoch, cursor) to micro-batches: readers, order, shares, augmentation, prefetch."""
