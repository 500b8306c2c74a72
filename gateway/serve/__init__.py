"""The gateway as a Ray Serve deployment."""
