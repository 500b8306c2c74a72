"""Copies that both processes of a prefill-decode pair take part in: over NCCL, or Gloo. Imports torch: workers only."""
