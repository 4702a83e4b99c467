"""The records of a run: one JSON event per line, with the machine it ran on."""
