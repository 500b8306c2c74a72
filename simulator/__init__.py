"""Replays a trace through the real scheduler, allocator and iteration scheduler in virtual time."""
