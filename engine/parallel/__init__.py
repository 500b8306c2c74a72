"""Models that several ranks compute together: each holds a part of every layer (tensor parallel)."""
