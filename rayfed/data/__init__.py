"""Data sets: readers, prepared images, partitions into clients."""
