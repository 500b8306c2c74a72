"""The HTTP application: routes, access checks and reading of request bodies."""
