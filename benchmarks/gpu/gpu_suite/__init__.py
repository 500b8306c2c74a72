"""What issue 6 wants shown on a GPU, as groups of cases: `benchmarks/gpu/run.sh` runs them."""
