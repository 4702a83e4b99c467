"""Every private API of PyTorch that shoestring uses, one module for each area of torch.

No other file names `torch._…`. When torch moves, look here first; this is what breaks:

- `fake_tensors` (`torch._subclasses.fake_tensor`): every prediction, so profile, plan and verify.
- `dispatch` (`torch.utils._python_dispatch`, `torch.overrides`, `torch._ops`): tracing, measuring
  on the CPU, sparse weights, state that a recomputed block writes.
- `trees` (`torch.utils._pytree`): whatever looks for the tensors of a batch or of a call.
- `autograd` (`torch._C`, `torch.autograd`, `torch.utils.checkpoint`): which operation a gradient
  belongs to; recomputation by recipe; sparse weights under checkpointing; whether recomputed
  values are those of the first pass.
- `storages` (`torch._C`, `torch._prims_common`): gradients added in place, and layouts, in traces.
- `kernels` (`torch._foreach_*`, `torch._fused_sgd_`, `torch._amp_*`): updates in 16 bits,
  accumulation, loss scaling.
- `cpu` (`torch._C`, `torch.cpu`, `torch.ops.mkldnn`): which kernels a CPU runs in 16 bits, for
  its budgets.
- `compiling` (`torch._functorch`, `torch._inductor`, `torch._dynamo`, `torch.overrides`): compiled
  blocks, and what they save, in predictions.
- `loggers` (`torch._subclasses`): an error in a model's code is shown once, without a traceback.
- `cuda_memory` (`torch._C`, `torch.cuda.memory`): captured steps; `Step.live`.

Beside these, code reads attributes that PyTorch does not document. They have not moved for years:
`_cdata` of a storage, `_version` of a tensor, `_opname`, `_schema` and `_overloadpacket` of an
operation, `_sequence_nr` of a node, `_parameters`, `_buffers` and hooks of a module, hooks of an
optimizer, and `_BatchNorm`, `_NormBase`, `_ConvNd`, `_DropoutNd` in `torch.nn.modules`. Operations
are named by their schema (`aten._cudnn_rnn`), which changes only between releases.
"""
