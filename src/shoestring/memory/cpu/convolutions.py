"""Scratch memory of CPU convolutions: oneDNN's copies in its own layouts, PyTorch's patches."""

from __future__ import annotations

import math

import torch

from ...torch_private.cpu import SixteenBits, sixteen_bits
from ...trace.graph import Op, TensorSpec, channels_last_order
from .operands import nbytes_of

_BLOCK = 16
"""Channels to which oneDNN's layouts are padded."""
_SMALL, _FEW_CHANNELS = 16 * 1024, 48 * 1024
"""Scratch of its convolutions for each thread; for images of few channels."""
_FEW_PIXELS = 20480
"""Of all channels of an image: PyTorch's limit."""


def _to_blocks(channels: int) -> int:
    return -(-channels // _BLOCK) * _BLOCK


def _padded(spec: TensorSpec | None) -> int:
    """With channels that fill blocks."""
    if spec is None:
        return 0
    size = nbytes_of(spec)
    if len(spec.shape) > 1 and spec.shape[1]:
        size = size // spec.shape[1] * _to_blocks(spec.shape[1])
    return size


def _groups(op: Op) -> int:
    return int(dict(op.settings).get("groups", 1))


def _weight_bytes(weight: TensorSpec, groups: int) -> int:
    """Padded in both channels, of each group alone."""
    out, into = weight.shape[:2]
    kernel = weight.numel // max(out * into, 1) * weight.dtype.itemsize
    flat = len(weight.shape) < 5
    if into == 1 and (groups == 1 or (groups == out and flat)):  # kernels for one channel a group
        return _to_blocks(out) * kernel
    return groups * _to_blocks(out // groups) * _to_blocks(into) * kernel


def _channels_last(op: Op, name: str) -> bool:
    dims = len(dict(op.inputs)[name].shape)
    return dims > 3 and dict(op.strided).get(name) == channels_last_order(dims)


def _unfit(op: Op, name: str) -> int:
    """A copy of what is strided in another way."""
    copied = name in dict(op.strided) and not _channels_last(op, name)
    return nbytes_of(dict(op.inputs)[name]) if copied else 0


def _is_first(weight: TensorSpec, groups: int) -> bool:
    """Of an image's few channels, which are read as they lie."""
    return weight.shape[1] <= 3 and groups == 1


def _makes_image(op: Op, weight: TensorSpec) -> bool:
    """A transposed convolution in FP32 that enlarges to an image's few channels, which are written
    as they lie. Its weight has the outgoing channels second."""
    transposed = dict(op.settings).get("transposed", False)
    flat = len(weight.shape) == 4 and weight.dtype.itemsize == 4
    return transposed and flat and _stride(op) > 1 and _is_first(weight, _groups(op))


def _of_one_pixel(weight: TensorSpec) -> bool:
    return all(n == 1 for n in weight.shape[2:])


def _stride(op: Op) -> int:
    return int(max(dict(op.settings).get("stride", (1,))))


def _is_product(op: Op, weight: TensorSpec) -> bool:
    """A kernel of one pixel that moves by one: a matrix product, which copies nothing, where
    one thread runs it on fewer images than PyTorch gives to oneDNN."""
    plain = _groups(op) == 1 and _stride(op) == 1 and dict(op.inputs)["input"].shape[0] < 16
    plain = plain and torch.get_num_threads() == 1
    return plain and _of_one_pixel(weight) and weight.dtype.itemsize == 4


def _kernels(op: Op, weight: TensorSpec) -> SixteenBits:
    """As `sixteen_bits`; in FP32 oneDNN has all but those of one small image."""
    if weight.dtype.itemsize == 2:
        return sixteen_bits(weight.dtype)
    return "native" if weight.dtype.itemsize == 8 or _is_small(op, weight) else "blocks"


def _is_small(op: Op, weight: TensorSpec) -> bool:
    """One image that PyTorch keeps from oneDNN (`ConvParams::use_mkldnn`)."""
    shape, kernel = dict(op.inputs)["input"].shape, (1, *weight.shape[2:])[-2:]
    pixels = math.prod(shape[:4])  # without the last dimension of a volume
    return _groups(op) == 1 and shape[0] == 1 and pixels <= _FEW_PIXELS and min(kernel) <= 3


def _image_bytes(spec: TensorSpec, itemsize: int) -> int:
    """Of one image of a batch, channels padded to blocks and rows to 32 pixels."""
    rows, row = math.prod(spec.shape[2:-1]), -(-spec.shape[-1] // 32) * 32
    return _to_blocks(spec.shape[1]) * rows * row * itemsize


def _columns(op: Op, weight: TensorSpec, source: TensorSpec, result: TensorSpec) -> int:
    """PyTorch's own convolution is a product of the weight with every patch, of the whole batch."""
    settings = dict(op.settings)
    transposed = settings.get("transposed", False)
    apart = max(settings.get("dilation", (1,))) > 1 and not transposed
    if _of_one_pixel(weight) and _stride(op) == 1 and not transposed and not apart:
        return 0
    images = 1 if apart else source.shape[0]
    patch = math.prod(weight.shape[1:])
    if len(weight.shape) == 5:  # of all groups together
        patch *= _groups(op)
    pixels = math.prod((source if transposed else result).shape[2:])
    beside = math.prod(result.shape[2:]) if transposed else 0  # ones, for the bias
    beside += source.numel if transposed and len(weight.shape) == 5 else 0
    return (images * patch * pixels + beside) * weight.dtype.itemsize


def _by_image(op: Op, small: TensorSpec, made: TensorSpec) -> int:
    """Kernels of one pixel pack the pixels that they read, where they leave some out, and sum
    16 bits in FP32: an image a thread."""
    given = dict(op.inputs)
    weight = given["weight"]
    if not _of_one_pixel(weight):
        return 0
    nbytes, narrow = 0, weight.dtype.itemsize == 2
    if _stride(op) > 1:
        pixels = math.prod(small.shape[2:])
        nbytes += given["input"].shape[1] * pixels * weight.dtype.itemsize + _SMALL
    if narrow:
        nbytes += 4 * _to_blocks(made.shape[1]) * math.prod(made.shape[2:])
    return torch.get_num_threads() * nbytes


def convolution(op: Op) -> int:
    """Of the operation in a forward pass."""
    given, result, groups = dict(op.inputs), op.outputs[0], _groups(op)
    weight, source = given["weight"], given["input"]
    if _is_product(op, weight):
        return _columns(op, weight, source, result)
    kind, last = _kernels(op, weight), _channels_last(op, "input")
    if kind == "native":
        turned = nbytes_of(weight) + nbytes_of(source) // groups if op.strided else 0
        copied = nbytes_of(result) if groups > 1 else 0
        return _columns(op, weight, source, result) + copied + turned + _unfit(op, "input")
    weights, first = _weight_bytes(weight, groups), _is_first(weight, groups)
    transposed = dict(op.settings).get("transposed", False)
    few = first or transposed
    small = torch.get_num_threads() * (_FEW_CHANNELS if few else _SMALL)
    beside = _by_image(op, result, result)
    if transposed:
        made = _padded(result)
        if _makes_image(op, weight):
            made, beside = nbytes_of(result), beside + small
            weights = _padded(weight) // weight.shape[0] * _to_blocks(weight.shape[0])
        copies = 0 if last and weight.dtype.itemsize == 4 else 2 * made
        copies += small if len(weight.shape) == 3 and _stride(op) > 1 else 0
        return copies + 2 * _padded(source) + 2 * weights + beside
    if last:
        by_pixel = nbytes_of(result) if groups > 1 and _of_one_pixel(weight) else 0
        return 2 * weights + beside + small + by_pixel
    inside, blocked = 0 if first else _padded(source), _padded(result)
    running = inside + weights + blocked + beside
    if groups == 1 or len(weight.shape) < 5:
        running -= nbytes_of(result)
    return max(running, blocked) + torch.get_num_threads() * _SMALL + _unfit(op, "input")


def convolution_backward(op: Op) -> int:
    """Of both gradients and the bias's, in one operation."""
    given, groups = dict(op.inputs), _groups(op)
    weight, source, gradient = given["weight"], given["input"], given["grad_output"]
    last, grad = _channels_last(op, "input"), _padded(gradient)
    if _makes_image(op, weight):
        grad = nbytes_of(gradient)
    turned = grad if last != _channels_last(op, "grad_output") else 0
    turned += _unfit(op, "input") + _unfit(op, "grad_output")
    if len(weight.shape) == 5 and _of_one_pixel(weight) and _stride(op) == 1:
        turned += nbytes_of(source)
    if _is_product(op, weight):
        return turned
    if _kernels(op, weight) == "native":
        copies = nbytes_of(source) + nbytes_of(gradient) if last or groups > 1 else turned
        copies += nbytes_of(weight) if last else 0
        narrow = weight.dtype.itemsize == 2
        in_fp32 = 4 * gradient.numel if narrow else 0  # for the gradient of the bias
        return max(_columns(op, weight, source, gradient) + copies, in_fp32)
    wide = _weight_bytes(weight, groups) * 4 // weight.dtype.itemsize
    weights = 2 * wide
    if weight.dtype.itemsize < 4:  # what is packed by row, of an image a thread
        rows = torch.get_num_threads() * (_image_bytes(source, 2) + _image_bytes(gradient, 2))
        weights = wide + _weight_bytes(weight, groups) + max(wide, rows)
    elif last and source.shape[1] % _BLOCK:
        weights += torch.get_num_threads() * _padded(source) // source.shape[0]
    weights += (torch.get_num_threads() - 1) * wide  # each has sums of its own
    if max(dict(op.settings).get("dilation", (1,))) > 1:  # of one image, where no kernel is fitted
        weights += _columns(op, weight, source, gradient)
    weights += _by_image(op, gradient, source) + torch.get_num_threads() * _SMALL
    if not last:
        wanted = dict(op.settings).get("output_mask", (True,))[0]
        read = _padded(source) if wanted or not _is_first(weight, groups) else 0
        if wanted and _stride(op) > 1:  # gradients of pixels that no kernel reaches
            small = torch.get_num_threads() * _SMALL
            return max(2 * read + small, read + grad) + turned + weights
        return read + grad + turned + weights
    if groups > 1 and _of_one_pixel(weight):
        weights += nbytes_of(source)
    return turned + weights + wide + _by_group(weight, groups, source, gradient)


def _by_group(weight: TensorSpec, groups: int, source: TensorSpec, gradient: TensorSpec) -> int:
    """Gradients of a grouped convolution's weights, each group padded in both channels: sums in
    FP32; in 16 bits the weights themselves, too, and what is read of one image, by group."""
    if groups == 1:
        return 0
    out, into = _to_blocks(weight.shape[0] // groups), _to_blocks(weight.shape[1])
    each = out * into * (weight.numel // (weight.shape[0] * weight.shape[1]))
    if weight.dtype.itemsize == 4:
        return 4 * groups * each
    wide = source.shape[-1] + weight.shape[-1] - 1
    rows, made = math.prod(source.shape[2:-1]), math.prod(gradient.shape[2:])
    return groups * (6 * each + torch.get_num_threads() * 2 * (into * rows * wide + out * made))
