#include "echelon/options/bind.h"

namespace echelon {

// Sources: the arguments of torch.distributed, torchtitan and nanoGPT, of
// Hugging Face's Trainer and models, of Lightning's Trainer, of DeepSpeed's
// configuration and of Megatron-LM, as their documentations list them.
std::span<const config::OtherNames> other_names() {
  static constexpr config::OtherNames kNames[] = {
      // Tables.
      {"model", "", "network net arch architecture"},
      {"data", "", "dataset datasets dataloader"},
      {"layout", "",
       "parallelism parallel mesh device_mesh strategy distributed pipeline "
       "tensor_parallel pipeline_parallel"},
      {"shard", "", "fsdp zero zero_optimization sharding"},
      {"memory", "",
       "activation_checkpoint activation_checkpointing recompute offload"},
      {"precision", "", "fp16 bf16 amp mixed_precision"},
      {"optimizer", "", "optim scheduler lr_scheduler optimization"},
      {"train", "", "training trainer loop"},
      {"checkpoint", "", "checkpoints checkpointing ckpt saving"},
      {"comm", "", "communication process_group nccl"},

      // [model]
      {"model.name", "", "arch architecture model_type model_name model"},
      {"model.classes", "", "num_classes num_labels n_classes"},
      {"model.hidden", "", "hidden_sizes layer_sizes hidden_units"},
      {"model.weights", "",
       "pretrained model_name_or_path pretrained_model_name_or_path "
       "from_pretrained init_from initial_load_path pretrained_checkpoint"},
      {"model.dtype", "", "torch_dtype params_dtype"},
      {"model.sync_batch_norm", "", "sync_batchnorm sync_bn use_sync_bn"},
      {"model.layers", "",
       "n_layer n_layers num_layers num_hidden_layers depth num_blocks"},
      {"model.hidden_size", "",
       "n_embd n_embed d_model dim embed_dim embedding_size hidden_dim "
       "model_dim"},
      {"model.heads", "", "n_head n_heads num_heads num_attention_heads"},
      {"model.kv_heads", "",
       "n_kv_heads n_kv_head num_kv_heads num_key_value_heads "
       "num_query_groups"},
      {"model.intermediate_size", "",
       "ffn_hidden_size d_ff n_inner mlp_dim ffn_dim intermediate_dim"},
      {"model.vocab_size", "", "n_vocab vocabulary_size padded_vocab_size"},
      {"model.max_positions", "",
       "n_positions n_ctx max_position_embeddings max_length"},
      {"model.rope_theta", "", "rotary_base rope_base"},
      {"model.rope_local_theta", "", "rope_local_base_freq"},
      {"model.rope_scaling", "", "rope_type"},
      {"model.rope_original_positions", "", "original_max_position_embeddings"},
      {"model.window", "", "sliding_window window_size"},
      {"model.global_every", "", "sliding_window_pattern"},
      {"model.attention_softcap", "", "attn_logit_softcapping"},
      {"model.logit_softcap", "", "final_logit_softcapping"},
      {"model.norm_eps", "",
       "rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon "
       "norm_epsilon"},
      {"model.dropout", "",
       "hidden_dropout attention_dropout resid_pdrop embd_pdrop attn_pdrop "
       "dropout_p hidden_dropout_prob"},
      {"model.tie_embeddings", "",
       "tie_word_embeddings tie_weights share_embeddings"},
      {"model.tie_embeddings", " = false",
       "untie_embeddings_and_output_weights"},
      {"model.cut", "",
       "split_points pipeline_split module_fqns_per_model_part"},
      {"model.devices", "", "device_map device_ids"},

      // [data]
      {"data.name", "", "dataset dataset_name"},
      {"data.path", "",
       "data_path data_dir dataset_path train_data_path root data_root"},
      {"data.sources", "", "data_files train_file train_files train_data"},
      {"data.weights", "", "data_weights blend sampling_weights"},
      {"data.sequence", "",
       "seq_len seq_length sequence_length max_seq_len max_seq_length "
       "block_size context_length context_size max_context_length"},
      {"data.workers", "", "num_workers dataloader_num_workers n_workers"},
      {"data.prefetch", "", "prefetch_factor dataloader_prefetch_factor"},
      {"data.drop_last", "", "dataloader_drop_last"},
      {"data.holdout", "",
       "val_split valid_split validation_split test_split test_size "
       "val_fraction split"},
      {"data.holdout_path", "",
       "validation_file val_path valid_data_path validation_path test_path "
       "eval_data"},
      {"data.tokenizer", "",
       "tokenizer_path tokenizer_model tokenizer_file tokenizer_name "
       "tokenizer_type hf_assets_path"},
      {"data.image_size", "", "img_size resolution crop_size input_size"},
      {"data.flip", "", "random_flip hflip horizontal_flip"},
      {"data.end_of_text_id", "", "eos_token_id eod_token eos_id eod_id"},
      {"data.documents", " = \"respected\"",
       "reset_attention_mask packing block_causal"},

      // [layout]
      {"layout.dp", "",
       "data_parallel_size dp_size dp_degree data_parallel_degree "
       "data_parallel_replicate_degree world_size nproc_per_node num_gpus "
       "gpus num_devices num_processes"},
      {"layout.fsdp", "",
       "fsdp_size fsdp_degree data_parallel_shard_degree sharding_size"},
      {"layout.dp", " or fsdp, the number of ranks",
       "strategy parallelism ddp train.devices"},
      {"layout.dp", ", the replicas of what fsdp shards",
       "num_distributed_optimizer_instances"},
      {"layout.tp", "",
       "tensor_model_parallel_size tensor_parallel_size tp_size tp_degree "
       "tensor_parallel_degree model_parallel_size mp_size tensor_parallel"},
      {"layout.pp", "",
       "pipeline_model_parallel_size pipeline_parallel_size pp_size "
       "pp_degree pipeline_parallel_degree pipeline_parallel stages "
       "num_stages pipeline_stages"},
      {"layout.cp", "",
       "context_parallel_size cp_size context_parallel_degree"},
      {"layout.context", "",
       "cp_comm_type context_parallel_rotate_method rotate_method"},
      {"layout.ep", "",
       "expert_model_parallel_size expert_parallel_size ep_size "
       "expert_parallel_degree"},
      {"model.capacity_factor", "",
       "moe_expert_capacity_factor expert_capacity_factor "
       "moe_capacity_factor"},
      {"layout.stages_per_rank", "",
       "virtual_pipeline_model_parallel_size num_virtual_stages_per_rank "
       "num_virtual_stages virtual_stages "
       "num_virtual_stages_per_pipeline_rank"},
      {"layout.stages_per_rank", ", a number of stages",
       "num_layers_per_virtual_pipeline_stage layers_per_stage "
       "pipeline_parallel_layers_per_stage"},
      {"layout.microbatches", "",
       "num_microbatches n_microbatches num_micro_batches micro_batches "
       "chunks"},
      {"layout.microbatches", ", their number, not their size",
       "pipeline_parallel_microbatch_size"},
      {"layout.schedule", "",
       "pipeline_schedule pipeline_parallel_schedule pp_schedule"},
      {"layout.overlap_chunks", "",
       "tp_comm_overlap async_tp enable_async_tensor_parallel"},
      {"layout.schedule_file", "", "pipeline_parallel_schedule_csv"},

      // [shard]
      {"shard.stage", "",
       "zero zero_stage zero_optimization sharding_strategy "
       "data_parallel_sharding_strategy sharding_stage"},
      {"shard.stage", " = 1",
       "use_distributed_optimizer distributed_optimizer "
       "zero_redundancy_optimizer"},
      {"shard.gather", "", "reshard_after_forward fsdp_reshard_after_forward"},
      {"shard.gather", " = \"step\"", "torch_fsdp2_no_reshard_after_forward"},
      {"shard.prefetch", "", "forward_prefetch limit_all_gathers"},
      {"shard.prefetch_bytes", "",
       "stage3_prefetch_bucket_size stage3_max_live_parameters"},
      {"shard.registered_buffers", "",
       "nccl_ub use_nccl_ub set_allocate_memory_from_process_group_for_comm"},

      // [memory]
      {"memory.recompute", " = \"all\" or \"selective\"",
       "gradient_checkpointing activation_checkpointing "
       "activation_checkpoint checkpoint_activations recompute_activations "
       "gradient_checkpoint checkpointing use_checkpoint "
       "recompute_granularity grad_checkpointing"},
      {"memory.activation_bytes", "", "memory_budget activation_memory_budget"},
      {"memory.activations", " = \"offload\"",
       "activation_offload activation_offloading cpu_offloading "
       "cpu_checkpointing"},
      {"memory.offload", " = \"optimizer\" or \"parameters\"",
       "cpu_offload offload_optimizer offload_param optimizer_cpu_offload "
       "fsdp_cpu_offload zero_offload"},
      {"memory.limit_bytes", "",
       "max_memory memory_limit gpu_memory_limit max_memory_bytes"},

      // [precision]
      {"precision.compute", " = \"bf16\"", "bf16 bfloat16"},
      {"precision.compute", " = \"tf32\"",
       "tf32 allow_tf32 float32_matmul_precision"},
      {"precision.compute", " = \"fp16\"", "fp16 float16 half"},
      {"precision.compute", "",
       "precision.dtype train.dtype train.precision mixed_precision "
       "mixed_precision_param amp use_amp autocast param_dtype precision"},
      {"precision.reduce", "",
       "reduce_dtype communication_data_type grad_reduce_in_bf16 "
       "mixed_precision_reduce accumulate_allreduce_grads_in_fp32"},
      {"precision.initial_loss_scale", "", "initial_scale init_scale"},
      {"precision.initial_loss_scale", ", not its power of 2",
       "initial_scale_power"},
      {"precision.loss_scale_growth", "", "loss_scale_window growth_interval"},

      // [optimizer]
      {"optimizer.name", "", "optim optimizer optimizer_type optimizer_name"},
      {"optimizer.learning_rate", "", "lr base_lr max_lr peak_lr"},
      {"optimizer.weight_decay", "", "wd l2 decay_rate"},
      {"optimizer.momentum", "", "sgd_momentum"},
      {"optimizer.beta1", " and beta2", "betas adam_betas"},
      {"optimizer.beta1", "", "adam_beta1"},
      {"optimizer.beta2", "", "adam_beta2"},
      {"optimizer.epsilon", "", "eps adam_epsilon adam_eps"},
      {"optimizer.clip_norm", "",
       "grad_clip clip_grad max_grad_norm max_norm gradient_clip_val "
       "gradient_clipping clip_grad_norm grad_clip_norm grad_norm_clip"},
      {"optimizer.schedule", "",
       "train.schedule lr_scheduler lr_scheduler_type scheduler "
       "lr_decay_style lr_schedule decay_type"},
      {"optimizer.warmup_steps", "",
       "warmup num_warmup_steps lr_warmup_iters lr_warmup_steps warmup_iters "
       "warmup_num_steps"},
      {"optimizer.warmup_steps", ", a number of steps",
       "warmup_ratio warmup_fraction lr_warmup_fraction warmup_epochs"},
      {"optimizer.final_factor", ", a fraction of learning_rate",
       "min_lr min_lr_ratio min_lr_factor eta_min lr_end"},
      {"optimizer.step_every", "", "step_size lr_step_size"},
      {"optimizer.step_factor", "", "gamma lr_gamma"},

      // [train]
      {"train.steps", "",
       "max_steps num_steps total_steps training_steps train_steps "
       "train_iters max_iters iterations num_iterations iters"},
      {"train.steps", ", at which the decay ends",
       "lr_decay_iters lr_decay_steps"},
      {"train.epochs", "",
       "max_epochs num_epochs num_train_epochs n_epochs train_epochs"},
      {"train.batch", "",
       "batch_size global_batch_size train_batch_size total_batch_size"},
      {"train.batch", ", the samples of all ranks and micro-batches",
       "micro_batch_size per_device_train_batch_size local_batch_size "
       "train_micro_batch_size_per_gpu device_batch_size "
       "per_gpu_batch_size microbatch_size"},
      {"train.accumulate", "",
       "gradient_accumulation gradient_accumulation_steps "
       "accumulate_grad_batches grad_accum grad_accum_steps "
       "accumulation_steps grad_accumulation update_freq"},
      {"train.seed", "", "random_seed manual_seed data_seed seed_everything"},
      {"train.run", ", a folder",
       "output_dir default_root_dir save save_dir run_dir out_dir log_dir "
       "dump_folder checkpoint_dir run_name job_name logging_dir"},
      {"train.overwrite", "", "overwrite_output_dir"},
      {"train.log_every", "",
       "logging_steps log_interval log_every_n_steps steps_per_print "
       "log_freq print_freq print_every logging_strategy"},
      {"train.eval_every", "",
       "eval_steps eval_interval val_check_interval eval_freq "
       "check_val_every_n_epoch validation_freq val_interval "
       "eval_strategy"},
      {"train.log", " = [\"tensorboard\"]",
       "logger loggers report_to tensorboard enable_tensorboard "
       "use_tensorboard tensorboard_dir opentelemetry otel tracing"},
      {"train.layer_norms", "", "log_grad_norm track_grad_norm"},
      {"train.threads", "", "num_threads omp_num_threads cpu_threads"},
      {"train.compress", "",
       "gradient_compression comm_hook ddp_comm_hook compression"},
      {"train.powersgd_rank", "", "matrix_approximation_rank"},
      {"train.bucket_bytes", " = \"25 MiB\"",
       "bucket_cap_mb ddp_bucket_cap_mb ddp_bucket_size "
       "allreduce_bucket_size reduce_bucket_size bucket_size"},
      {"train.find_unused_parameters", "",
       "ddp_find_unused_parameters unused_parameters"},
      {"train.cuda_graphs", "",
       "cuda_graph enable_cuda_graph use_cuda_graph cudagraphs "
       "external_cuda_graph"},
      {"train.timeline_steps", "",
       "profile profiler profile_steps profile_freq enable_profiling"},

      // No key.
      {"", "there is no compiler, layers run as they are written",
       "compile torch_compile use_compile torchcompile compile_model "
       "torch_compile_backend torch_compile_mode jit"},

      // [checkpoint]
      {"checkpoint.every_steps", "",
       "save_steps save_every save_interval save_freq checkpoint_every "
       "checkpoint_interval every_n_train_steps every_n_steps ckpt_freq "
       "ckpt_interval save_strategy"},
      {"checkpoint.every_minutes", "", "train_time_interval"},
      {"checkpoint.at_end", "",
       "save_last save_on_train_end enable_checkpointing"},
      {"checkpoint.keep", "",
       "save_total_limit keep_latest_k keep_last max_checkpoints"},
      {"checkpoint.keep", " for the newest, or best for the best one",
       "save_top_k"},
      {"checkpoint.best", "",
       "metric_for_best_model monitor load_best_model_at_end keep_best"},
      {"checkpoint.async", "",
       "async_save async_mode async_checkpointing async_ckpt"},
      {"checkpoint.resume", "",
       "resume_from_checkpoint resume_from ckpt_path load_checkpoint "
       "resume_path load auto_resume"},

      // [comm]
      {"comm.backend", "",
       "dist_backend ddp_backend distributed_backend "
       "process_group_backend"},
      {"comm.timeout", "",
       "distributed_timeout_minutes ddp_timeout nccl_timeout dist_timeout "
       "train_timeout_seconds process_group_timeout"},
      {"comm.rendezvous_timeout", "", "init_timeout_seconds rdzv_timeout"},
  };
  return kNames;
}

}  // namespace echelon
