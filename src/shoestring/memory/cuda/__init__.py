"""Bytes that CUDA's allocator and libraries take, by rule, calibrated on a device."""
