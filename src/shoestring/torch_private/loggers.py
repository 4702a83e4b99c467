"""Names of PyTorch's loggers; this file does not import PyTorch."""

FAKE_TENSORS = "torch._subclasses.fake_tensor"
"""Logs a traceback for every error that is then raised."""
