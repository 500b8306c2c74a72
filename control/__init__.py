"""The control plane's shared parts: gRPC servers and links, joining the supervisor, and conversions to messages."""
