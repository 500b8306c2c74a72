"""Keeps every open request from its submission to its last token, and submits it again after a failure."""
