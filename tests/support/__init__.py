"""Support code of the tests: fakes, killed processes, clusters of several machines, and their checks."""
