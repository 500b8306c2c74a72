"""Converts tokens to replies in OpenAI's formats and in gRPC messages."""
