"""Names of the lines of the tables, by which targets find them."""

LOOP, COPY = "AdamW-shaped loop in C++", "copy"
LIMITS = (LOOP, COPY)
OURS, OUR_ADAMW = "zero_shard operators", "zero_shard.AdamW"
FUSED, FOR_LOOP, FOREACH = "torch fused", "torch for-loop", "torch foreach"
WITH_MASTER, WITH_MASTER_FLAT = "torch fused, bf16 + fp32 master", "torch fused, bf16 + fp32 master, flat"
DEEPSPEED, DEEPSPEED_WITH_COPY = "DeepSpeedCPUAdam", "DeepSpeedCPUAdam bf16 + copy"
TORCHAO, BITSANDBYTES = "torchao AdamW8bit", "bitsandbytes AdamW8bit"
APEX, APEX_DISTRIBUTED = "apex FusedAdam", "apex DistributedFusedAdam"
EIGHT_BIT, SMALL = ", 8-bit moments", ", small tensors"
BY_TORCH, BY_CONFIG = "clip_grad_norm_", "max_grad_norm"
BY_REDUCTION, BY_PASS = "norm from the reduction", "norm by its own pass"
