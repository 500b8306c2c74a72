"""A prefill instance: chunked prefill, offload to the pool, and the candidate buffers of its decode instances."""
