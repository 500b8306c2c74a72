"""The global scheduler's decisions, without I/O: admission, routing, batches and prefetches."""
