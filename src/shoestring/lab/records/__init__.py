"""What a run leaves behind: one JSON event per line, and where it was made."""
