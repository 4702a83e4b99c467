"""A budget in bytes → a plan."""
