"""Train neural networks in a small, known amount of memory."""
__version__ = "0.1.0"
