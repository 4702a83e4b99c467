"""Other libraries' trainers under a plan; each module imports its library when it is imported."""
