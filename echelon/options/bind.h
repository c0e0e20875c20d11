// The keys of a configuration that set the options of this folder, with their
// rules and help texts. The options structs are free of LibTorch, so that the
// command line reads and checks them.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "echelon/config/section.h"
#include "echelon/layout/layout.h"
#include "echelon/options/checkpoint.h"
#include "echelon/options/comm.h"
#include "echelon/options/context.h"
#include "echelon/options/data.h"
#include "echelon/options/elastic.h"
#include "echelon/options/memory.h"
#include "echelon/options/model.h"
#include "echelon/options/optimizer.h"
#include "echelon/options/precision.h"
#include "echelon/options/shard.h"
#include "echelon/options/tensor.h"
#include "echelon/options/train.h"

namespace echelon {

void bind(config::Section& section, ModelOptions& options);  // [model]
void bind(config::Section& section, LoraOptions& options);   // [lora]
void bind(config::Section& section, DataOptions& options);   // [data]
/// [layout]: the degrees of the axes, each at least 1, and their order.
void bind(config::Section& section, Layout& layout);
/// [layout]: sequence_parallel, overlap_chunks.
void bind(config::Section& section, TensorParallelOptions& options);
/// [layout]: context.
void bind(config::Section& section, ContextParallelOptions& options);
void bind(config::Section& section, ShardOptions& options);      // [shard]
void bind(config::Section& section, MemoryOptions& options);     // [memory]
void bind(config::Section& section, PrecisionOptions& options);  // [precision]
void bind(config::Section& section, OptimizerOptions& options);  // [optimizer]
void bind(config::Section& section, TrainOptions& options);      // [train]
void bind(
    config::Section& section, CheckpointOptions& options);     // [checkpoint]
void bind(config::Section& section, ElasticOptions& options);  // [elastic]
void bind(config::Section& section, CommOptions& options);     // [comm]

/// The keys of the layout's degrees, both names of each.
const std::vector<std::string>& degree_keys();

/// What PyTorch, Hugging Face, Lightning, DeepSpeed and Megatron-LM call the
/// tables and keys, for the errors of unknown ones.
std::span<const config::OtherNames> other_names();

/// The order as a configuration writes it: ["dp", "fsdp", …].
std::vector<std::string> order_names(const AxisOrder& order);

}  // namespace echelon
