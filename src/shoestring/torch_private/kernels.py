"""Kernels over many tensors at once, and others without a public function."""

import torch

foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
fused_sgd_ = torch._fused_sgd_
find_overflow_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
update_scale_ = torch._amp_update_scale_
cudnn_rnn_flatten_weight = torch._cudnn_rnn_flatten_weight
