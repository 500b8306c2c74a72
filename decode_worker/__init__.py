"""A decode instance: the decode loop with its iteration scheduler, hand-over and eviction."""
