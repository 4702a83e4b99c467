"""What CUDA's allocator and libraries take, by rule, calibrated on a device."""
