"""Plan + model + optimizer → a training step that runs."""
