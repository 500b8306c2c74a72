"""What runs on each node: the agent that owns memory segments and ends processes, and the checks for hung ones."""
