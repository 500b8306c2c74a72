"""The global scheduler's process: carries events to the core and its actions to the roles."""
