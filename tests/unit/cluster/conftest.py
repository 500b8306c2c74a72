"""Roles of this folder's clusters are forked, except those that test their imports."""

from support.forked_starts import forked_starts_except

forked_starts = forked_starts_except("test_spares")
