"""From a trace to bytes: of one tensor, of a whole step, and as a device measures them."""
