"""Decides which role processes run, and replaces those that die."""
