"""Starts role processes and finds room for them: as Ray actors or as plain child processes."""
