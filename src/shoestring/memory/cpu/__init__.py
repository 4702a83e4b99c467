"""The CPU's own rules: scratch memory of its kernels, beside tensors."""
