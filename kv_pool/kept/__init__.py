"""What a shard's prefix cache keeps for longer than its order of eviction would: pins, and sessions that go on."""
