"""The HTTP application: routes, access checks and the reading of bodies."""
