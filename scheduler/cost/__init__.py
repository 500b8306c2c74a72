"""Cost models: the time of one forward pass of an instance, from the tokens and prefix lengths in it."""
