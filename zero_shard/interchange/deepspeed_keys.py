"""Every key that DeepSpeed 0.19.8 knows in its JSON config, and what becomes of it here.

A section that stands here without keys of its own is taken or refused as a whole.
"""

from __future__ import annotations

# Turned into settings or into lines of the training script.
MAPPED = frozenset(
    """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
    gradient_clipping communication_data_type dataloader_drop_last
    optimizer optimizer.type optimizer.params scheduler scheduler.type scheduler.params
    bf16 bf16.enabled bf16.check_grad_overflow bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states
    fp16 fp16.enabled fp16.loss_scale fp16.initial_scale_power fp16.loss_scale_window
    torch_autocast torch_autocast.enabled torch_autocast.dtype
    data_types data_types.param_dtype data_types.buffer_dtype
    zero_optimization zero_optimization.stage zero_optimization.reduce_bucket_size
    zero_optimization.prefetch_bucket_size zero_optimization.zero_hpz_partition_size zero_optimization.mics_shard_size
    zero_optimization.zero_quantized_gradients
    checkpoint
    """.split()
)

_WHOLE = "zero_shard.full_state_dict(model) gives whole weights"

# Nothing need be done; a text says what is different, and is shown where the key is set.
HARMLESS = {
    "steps_per_print": "",
    "wall_clock_breakdown": "zero_shard.Monitor writes the parts of a step",
    "memory_breakdown": "optimizer.usage() says what is held",
    "dump_state": "",
    "disable_python_gc": "call gc.disable() yourself",
    "log_level": "",
    "vocabulary_size": "",
    "timers": "",
    "comms_logger": "optimizer.usage() says what is sent",
    "flops_profiler": "torch.profiler shows the steps",
    "tensorboard": "zero_shard.Monitor(optimizer, tensorboard=True)",
    "wandb": "call wandb in the script",
    "csv_monitor": "zero_shard.Monitor writes lines of JSON",
    "comet": "call comet in the script",
    "aio": "",
    "datastates_ckpt": "zero_shard.async_save saves while training goes on",
    "activation_checkpointing": "call torch.utils.checkpoint in the model; it works at every stage",
    "disable_allgather": "",
    "prescale_gradients": "sums are taken in float32 and divided once, which needs no scale before",
    "gradient_predivide_factor": "sums are taken in float32 and divided once, which needs no scale before",
    "seq_parallel_communication_data_type": "",
    "zero_allow_untested_optimizer": "",
    "zero_force_ds_cpu_optimizer": "",
    "use_data_before_expert_parallelism": "",
    "data_parallel_size": "the ranks of process_group are the data-parallel ones",
    "optimizer.legacy_fusion": "",
    "bf16.immediate_grad_update": "",
    "fp16.auto_cast": "param_dtype casts floating inputs in any case",
    "fp16.hysteresis": "torch.amp.GradScaler halves its scale at every overflow",
    "fp16.consecutive_hysteresis": "torch.amp.GradScaler halves its scale at every overflow",
    "fp16.min_loss_scale": "torch.amp.GradScaler has no lower bound",
    "torch_autocast.lower_precision_safe_modules": "torch.autocast decides by operator, not by module",
    "data_types.grad_accum_dtype": "gradients are accumulated in float32",
    "data_types.keep_in_fp32_modules": "buffers stay as they are unless param_dtype.buffers is set",
    "checkpoint.tag_validation": "",
    "checkpoint.load_universal": "zero-shard ckpt import reads what DeepSpeed saved",
    "checkpoint.parallel_write": "",
    "checkpoint.checkpoint_serialization": "",
    "checkpoint.writer": "",
    "zero_optimization.contiguous_gradients": "",
    "zero_optimization.reduce_scatter": "",
    "zero_optimization.use_multi_rank_bucket_allreduce": "",
    "zero_optimization.allgather_partitions": "",
    "zero_optimization.allgather_bucket_size": "",
    "zero_optimization.overlap_comm": "",
    "zero_optimization.compute_grad_norm": "",
    "zero_optimization.load_from_fp32_weights": "",
    "zero_optimization.elastic_checkpoint": "checkpoints load at any number of ranks",
    "zero_optimization.sub_group_size": "",
    "zero_optimization.param_persistence_threshold": "small parameters are gathered with the unit they are in",
    "zero_optimization.model_persistence_threshold": "",
    "zero_optimization.max_live_parameters": "the unit in use, those ahead (prefetch) and no more are whole",
    "zero_optimization.max_reuse_distance": "reshard_after_forward = false keeps parameters until backward",
    "zero_optimization.gather_16bit_weights_on_model_save": _WHOLE,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _WHOLE,
    "zero_optimization.module_granularity_threshold": "units = [class names] says what is gathered as one",
    "zero_optimization.use_all_reduce_for_fetch_params": "",
    "zero_optimization.allgather_sequential": "",
    "zero_optimization.ignore_unused_parameters": "unused parameters need no option, and are no error",
    "zero_optimization.legacy_stage1": "",
    "zero_optimization.round_robin_gradients": "",
    "zero_optimization.parameter_alignment": "",
    "zero_optimization.memory_efficient_linear": "",
    "zero_optimization.pipeline_loading_checkpoint": "",
    "zero_optimization.override_module_apply": "",
    "zero_optimization.log_trace_cache_warnings": "",
    "zero_optimization.enable_sanity_checks": 'check = "every_step" compares ranks in every step',
    "zero_optimization.save_muon_momentum_buffer_in_memory": "",
    "zero_optimization.leaf_module": "modules whose path depends on the data need no option; units names what is one",
    "zero_optimization.mics_hierarchical_params_gather": "",
}

_OFFLOAD = 'nothing is offloaded; remove it and see what fits with zero-shard plan, or take state_dtype = "int8"'
_QUANTIZED = 'remove it; weights travel in bfloat16 with param_dtype = "bfloat16"'
_GONE = "DeepSpeed itself has dropped it; remove it"

# What changes the training and does not exist here, with the remedy; refused if the value asks for it.
REFUSED = {
    "gradient_allreduce_op": "gradients are averaged; remove it and multiply the loss by the number of ranks",
    "pipeline": "there is no pipeline parallelism; remove it, or split the model with torch.distributed.pipelining",
    "tensor_parallel": "the model is not split for you; split it yourself and pass process_group=mesh['dp']",
    "expert_parallel": "experts are not spread over ranks; remove it, they are sharded as all parameters are",
    "sequence_parallel_size": "sequences are not split; remove it, or split them in the model",
    "hybrid_engine": "there is no inference engine; remove it",
    "autotuning": "nothing is tuned; remove it and compare settings with zero-shard plan",
    "data_efficiency": "data are not scheduled; remove it and choose samples in the data loader",
    "weight_quantization": "weights are not quantized; remove it",
    "compile": "DeepCompile does not exist here; remove it and call torch.compile in the script",
    "amp": 'remove it and write "bf16" or "fp16", or torch.autocast in the script',
    "sparse_gradients": "sparse gradients are not averaged; remove it and build the embedding with sparse=False",
    "elasticity": "remove it; checkpoints load at any number of ranks, and torchrun --max-restarts starts again",
    "curriculum_learning": "data are not scheduled; remove it and choose samples in the data loader",
    "nebula": "remove it; zero_shard.async_save saves while training goes on",
    "compression_training": _GONE,
    "quantize_training": _GONE,
    "eigenvalue": _GONE,
    "sparse_attention": _GONE,
    "graph_harvesting": _GONE,
    "progressive_layer_drop": _GONE,
    "fp16.fp16_master_weights_and_grads": "float16 weights keep float32 masters; remove it",
    "checkpoint.use_node_local_storage": "ranks must share the file system of checkpoints; remove it",
    "zero_optimization.offload_param": _OFFLOAD,
    "zero_optimization.offload_optimizer": _OFFLOAD,
    "zero_optimization.cpu_offload": _OFFLOAD,
    "zero_optimization.cpu_offload_param": _OFFLOAD,
    "zero_optimization.cpu_offload_use_pin_memory": _OFFLOAD,
    "zero_optimization.zenflow": _OFFLOAD,
    "zero_optimization.zero_quantized_weights": _QUANTIZED,
    "zero_optimization.zeropp_loco_param": _QUANTIZED,
    "zero_optimization.zero_quantized_nontrainable_weights": "frozen weights are not quantized; remove it",
}

# Other names of the same.
ALIASES = {
    "bfloat16": "bf16",
    **{
        f"zero_optimization.stage3_{name}": f"zero_optimization.{name}"
        for name in (
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "gather_16bit_weights_on_model_save",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
        )
    },
}

KEYS = MAPPED | HARMLESS.keys() | REFUSED.keys() | ALIASES.keys()
