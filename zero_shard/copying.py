"""Deep copies of buckets: the same numbers in memory of their own, over the copies of the parameters."""

from __future__ import annotations

import copy
from typing import Any

from zero_shard.buffers import Bucket
from zero_shard.masters import watch


def copy_bucket(bucket: Bucket, memo: dict[int, Any]) -> Bucket:
    """Return a bucket like ``bucket``, without gradients, over ``copy.deepcopy`` of its parameters. Local.

    Args:
        memo: Of the deepcopy under way. Where it has copies of the parameters already, those move into the new bucket;
            else they are made.
    """
    copied = Bucket.__new__(Bucket)
    # Tensors that share a storage share its copy, so that views of ``full`` are views of its copy.
    vars(copied).update(copy.deepcopy({name: value for name, value in vars(bucket).items() if name != "grad"}, memo))
    copied.grad, copied.has_sums = None, False
    for original, param, view in zip(bucket.params, copied.params, copied.views, strict=True):
        param.data = view
        if getattr(param, "grad_dtype", None) != getattr(original, "grad_dtype", None):
            param.grad_dtype = original.grad_dtype
    watch(copied)
    return copied
