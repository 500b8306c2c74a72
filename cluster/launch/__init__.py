"""Places and starts processes of roles, as Ray actors or as plain child processes."""
