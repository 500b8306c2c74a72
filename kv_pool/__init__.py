"""The host-memory KV pool: leases, commits, and the allocation table in each shard's segment."""
