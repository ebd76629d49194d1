"""The keys of a DeepSpeed configuration that no call of tiered takes, each with the reason.

A key is "dropped" where the training's numbers do not depend on it, "refused" where they do or a feature is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

__all__ = ["DROPPED", "FILLED", "REFUSED", "UNKNOWN", "KeyNote", "notes_on"]

DROPPED, REFUSED, FILLED, UNKNOWN = "dropped", "refused", "filled", "unknown"


class KeyNote(NamedTuple):
    """One key that no call has: ``outcome`` is one of the words above; ``key`` has dots."""

    outcome: str
    reason: str
    key: str


_DECIDED = "decided by tiered, from the model and the budget"
_PROFILE = "tiered bench DIR measures the drive and leaves a profile that each store there takes"
_REPORTS = "store.statistics().summary() has figures for any logger, tiered train --timeline draws a run"
_CHECKPOINT = "always so: a commit is whole and durable, and resumes under any budget"
_WEIGHTS = "always so: state_dict() has whole tensors, streamed"
_RANKS = "about ranks; this program has one"
_LOSSY = 'no lossy compression of weights or gradients; state="compact" keeps the optimizer\'s state in 8 bits'
_MODEL = "a change of the model or of its data, which the program that calls train() makes"

_REASONS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        (
            "zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.prefetch_bucket_size",
            "zero_optimization.stage3_max_live_parameters", "zero_optimization.max_live_parameters",
            "zero_optimization.stage3_max_reuse_distance", "zero_optimization.max_reuse_distance",
            "zero_optimization.stage3_param_persistence_threshold", "zero_optimization.param_persistence_threshold",
            "zero_optimization.stage3_model_persistence_threshold", "zero_optimization.model_persistence_threshold",
            "zero_optimization.reduce_bucket_size", "zero_optimization.allgather_bucket_size",
            "zero_optimization.sub_group_size", "zero_optimization.overlap_comm",
            "zero_optimization.contiguous_gradients",
            "zero_optimization.reduce_scatter", "zero_optimization.allgather_partitions",
            "zero_optimization.use_multi_rank_bucket_allreduce", "zero_optimization.round_robin_gradients",
            "zero_optimization.use_all_reduce_for_fetch_params", "zero_optimization.module_granularity_threshold",
            "zero_optimization.stage3_module_granularity_threshold", "zero_optimization.log_trace_cache_warnings",
            "zero_optimization.memory_efficient_linear", "zero_optimization.cpu_offload_use_pin_memory",
            "zero_optimization.offload_param.pin_memory", "zero_optimization.offload_optimizer.pin_memory",
            "zero_optimization.offload_optimizer.pipeline_read", "zero_optimization.offload_optimizer.pipeline_write",
            "zero_optimization.offload_optimizer.fast_init", "zero_optimization.offload_optimizer.ratio",
            "zero_force_ds_cpu_optimizer",
        ),
        (DROPPED, _DECIDED),
    ),
    **dict.fromkeys(
        (
            "zero_optimization.mics_shard_size", "zero_optimization.mics_hierarchical_params_gather",
            "zero_optimization.zero_hpz_partition_size", "communication_data_type", "prescale_gradients",
            "gradient_predivide_factor", "sparse_gradients", "disable_allgather", "local_rank", "tensor_parallel",
            "sequence_parallel_size", "seq_parallel_communication_data_type", "pipeline", "elasticity",
            "use_data_before_expert_parallelism", "comms_logger",
        ),
        (DROPPED, _RANKS),
    ),
    **dict.fromkeys(("aio", "zero_optimization.aio", "autotuning"), (DROPPED, _PROFILE)),
    **dict.fromkeys(
        (
            "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "flops_profiler",
            "tensorboard", "wandb", "comet", "csv_monitor", "timers",
        ),
        (DROPPED, _REPORTS),
    ),
    **dict.fromkeys(
        ("checkpoint", "nebula", "zero_optimization.elastic_checkpoint", "zero_optimization.load_from_fp32_weights"),
        (DROPPED, _CHECKPOINT),
    ),
    **dict.fromkeys(
        (
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            "zero_optimization.gather_16bit_weights_on_model_save",
            "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        ),
        (DROPPED, _WEIGHTS),
    ),
    **dict.fromkeys(
        ("zero_allow_untested_optimizer", "zero_optimization.ignore_unused_parameters"),
        (DROPPED, "nothing to allow: tiered takes parameters without a gradient, and has optimizers of its own"),
    ),
    **dict.fromkeys(
        (
            "activation_checkpointing.contiguous_memory_optimization", "activation_checkpointing.number_checkpoints",
            "activation_checkpointing.synchronize_checkpoint_boundary", "activation_checkpointing.profile",
        ),
        (DROPPED, "decided by tiered: activations= is for whole units"),
    ),
    **dict.fromkeys(
        (
            "zero_optimization.zero_quantized_weights", "zero_optimization.zero_quantized_gradients",
            "zero_optimization.zero_quantized_nontrainable_weights", "compression_training", "quantize_training",
            "weight_quantization",
        ),
        (REFUSED, _LOSSY),
    ),
    **dict.fromkeys(
        (
            "sparse_attention", "progressive_layer_drop", "eigenvalue", "curriculum_learning", "data_efficiency",
            "hybrid_engine", "moe",
        ),
        (REFUSED, _MODEL),
    ),
    **dict.fromkeys(
        ("zero_optimization.zenflow", "zero_optimization.offload_optimizer.super_offload"),
        (REFUSED, "updates are never late or approximate here; they overlap with backward and the next forward"),
    ),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": (DROPPED, "torch.set_num_threads() divides the cores"),
    "compile": (REFUSED, "tiered.shard works on eager modules: torch.compile is for functions inside of them"),
    "amp": (REFUSED, "Apex is not used: \"fp16\" and \"bf16\" choose the dtype"),
    "fp16.auto_cast": (DROPPED, "always so: fp16 is computed under torch.autocast"),
    "fp16.consecutive_hysteresis": (DROPPED, "torch's loss scaling has no hysteresis"),
    "fp16.fp16_master_weights_and_grads": (REFUSED, "masters are exact or compact (state=), never fp16"),
    "bf16.immediate_grad_update": (DROPPED, _DECIDED),
    "bf16.check_grad_overflow": (REFUSED, "bf16 steps are never skipped"),
    "data_types": (REFUSED, "gradients add up in the parameters' dtype, in the order of the micro-batches"),
    "optimizer.params.torch_adam": (DROPPED, "the arithmetic is always that of torch.optim.AdamW(fused=True)"),
    "optimizer.params.fp32_optimizer_states": (DROPPED, "always so with state=\"exact\", the default"),
    "optimizer.params.max_grad_norm": (DROPPED, "DeepSpeed passes it over as well: gradient_clipping clips"),
    "optimizer.legacy_fusion": (DROPPED, _DECIDED),
}  # fmt: skip


def notes_on(path: str, value: Any) -> Iterator[KeyNote]:
    """Yield what is to be said of the key ``path`` that nothing has read: one note, or one for each key inside."""
    outcome, reason = _REASONS.get(path, ("", ""))
    if outcome == REFUSED and _is_off(value):
        yield KeyNote(DROPPED, "it is off", path)
    elif outcome:
        yield KeyNote(outcome, reason, path)
    elif isinstance(value, Mapping) and value and any(key.startswith(f"{path}.") for key in _REASONS):
        for name, inner in value.items():
            yield from notes_on(f"{path}.{name}", inner)
    else:
        yield KeyNote(UNKNOWN, "nothing is known of this key, and nothing was done for it", path)


def _is_off(value: Any) -> bool:
    """Return whether a feature that tiered lacks is switched off, so that nothing is missing."""
    return value in (False, None, 0) or (isinstance(value, Mapping) and value.get("enabled") is False)
