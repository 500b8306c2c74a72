"""The node agent, which owns memory segments and ends processes, and the checks for hung processes on a node."""
