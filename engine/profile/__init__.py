"""Measures passes, copies and memory rates, and fits a cost model to them."""
