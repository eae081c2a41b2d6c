"""Trainers and loops of other libraries; each file needs its library, and ``import zero_shard`` imports none."""
