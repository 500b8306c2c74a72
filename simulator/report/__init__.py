"""The figures of a simulated run and the files that show them."""
