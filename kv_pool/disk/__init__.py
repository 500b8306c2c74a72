"""The disk tier of a shard: cached blocks that the shard gives up soon are kept in a file (ADR 67)."""
