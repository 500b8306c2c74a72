"""Decisions of one instance at each iteration: what runs, what joins, what is evicted, which blocks are free."""
