"""AlignedServe: disaggregated LLM serving that batches requests by prefix length."""

__version__ = "0.1.0"
