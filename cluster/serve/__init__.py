"""Starts and configures Ray, Ray Serve and HAProxy."""
