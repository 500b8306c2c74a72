"""The `alignedserve` command."""
