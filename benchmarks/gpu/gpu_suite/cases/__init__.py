"""One module a group: `run(context)` measures its cases, each on its own."""
