"""Trainers and loops of other libraries. ``import zero_shard`` imports nothing of it; each file needs its library."""
