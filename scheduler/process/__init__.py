"""The scheduler's process: passes events from the roles to the core, and the core's actions to the roles."""
