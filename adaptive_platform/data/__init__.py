"""From (seed, epoch, cursor) to micro-batches: readers, global order, shares, augmentation, prefetch."""
