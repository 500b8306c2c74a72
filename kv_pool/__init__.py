"""The host-memory pool: leases, commits, and the allocation table in its segment."""
