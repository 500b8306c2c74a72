"""The groups' modules. `run(context)` measures a group's cases; one that fails does not stop the others."""
