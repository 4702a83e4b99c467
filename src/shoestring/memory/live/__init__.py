"""Measure a real step, tensor by tensor."""
