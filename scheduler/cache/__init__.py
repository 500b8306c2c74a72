"""What a prefix cache gives up first."""
