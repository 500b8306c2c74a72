"""Structured output: grammars are compiled once, and each answer under one has a matcher that masks its tokens."""
