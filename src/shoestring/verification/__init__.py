"""Planned training beside plain training: what differs, and what was promised."""
