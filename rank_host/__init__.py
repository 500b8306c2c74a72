"""Ranks of an instance on another node than its first: the process that starts them there, and the stream to it."""
