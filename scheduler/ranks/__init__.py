"""Placement of requests on decode ranks that wait for each other in every iteration."""
