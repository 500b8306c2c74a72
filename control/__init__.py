"""Shared parts of the control plane: gRPC servers and links, joining the supervisor, and conversion to messages."""
