"""What the scripts of this folder share: workloads, runs of the simulator in parallel and cached, capacity, tables."""
