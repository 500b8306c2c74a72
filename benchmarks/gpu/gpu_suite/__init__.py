"""The GPU measurements of issue 6, as groups of cases. `benchmarks/gpu/run.sh` runs them."""
