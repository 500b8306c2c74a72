"""A decode instance: the iteration loop around the iteration scheduler, hand-over, eviction."""
