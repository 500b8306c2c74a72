"""Roles of this folder's clusters are forked, except in the files that test their starts and ends."""

from support.forked_starts import forked_starts_except

forked_starts = forked_starts_except("test_workers", "test_losses")
