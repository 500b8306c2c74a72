"""Cost models: what one forward pass of an instance takes, by the tokens and the lengths in it."""
