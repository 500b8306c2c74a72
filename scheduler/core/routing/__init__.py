"""Which prefill instance computes a prompt: `scheduler.routing`."""
