"""What to do: the plan, as a value."""
