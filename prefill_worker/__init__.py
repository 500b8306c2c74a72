"""A prefill instance: chunked prefill, offload to the pool, and the two candidate buffers of its decode instances."""
