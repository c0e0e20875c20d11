// A job: every component's options, from one configuration file and the command
// line. Free of LibTorch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/config/document.h"
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
#include "echelon/schedule/options.h"

namespace echelon {

struct Job {
  ModelOptions model;
  DataOptions data;
  Layout layout;
  PipelineLayout pipeline;         // in [layout] too; read when layout.pp > 1
  TensorParallelOptions tensor;    // in [layout] too; read when layout.tp > 1
  ContextParallelOptions context;  // in [layout] too; read when layout.cp > 1
  ShardOptions shard;              // read when layout.dp_shard > 1
  MemoryOptions memory;
  PrecisionOptions precision;
  OptimizerOptions optimizer;
  TrainOptions train;
  CheckpointOptions checkpoint;
  ElasticOptions elastic;
  CommOptions comm;
  /// The place where each value was set, for errors and `config show`. Empty
  /// when a program filled the options itself.
  config::Document document;
};

/// Whether parameters are kept in flat shards with a separate master copy
/// (parallel/shard): because they are sharded over dp_shard, used or reduced in
/// another dtype, or kept in the host's memory.
bool shards_parameters(const Job& job);

/// Whether gradients are summed, over ranks or, in low precision, over the
/// passes of a step. precision.reduce then says in which type.
bool adds_gradients(const Job& job);

/// What the command line sets over the file.
struct Overrides {
  std::vector<std::string> set;  // "train.steps=100"
  std::string layout;            // "dp=2"; replaces the degrees of [layout]
  int64_t num_ranks = 0;         // -n; without any degree, dp is this many
  std::string ranks;             // --ranks, "processes" or "threads"
  bool overwrite = false;        // --overwrite
  std::string resume;            // --resume
};

/// Reads and checks each value by itself; check_job checks them together.
/// Fills in what train.run names by {name} (the file's, without its extension),
/// {time} (now, as in 20261124-093000) and {set} (the layout and settings of
/// the command line, as in fsdp=2,learning_rate=0.1). Throws ConfigError with
/// file, line and column, five lines at most.
Job load_job(const std::string& path, const Overrides& overrides = {});
/// The same for a configuration's text, which errors call `name`.
Job parse_job(const std::string& text, const std::string& name);

/// The tables of a configuration with the options' current values, all marked
/// as `default`: the base of the reference and of to_toml.
config::Document describe(Job job);

/// A setting that two configurations give different values.
struct SettingChange {
  std::string table;  // "train"
  std::string key;    // "batch"
  std::string now;    // as TOML has it; "not set" without
  std::string before;
};

/// Compares texts of lines "key = value" below lines "[table]", as to_toml and
/// manifests have them, in the order of `now`. Where a table has a key twice,
/// first lines are compared with first ones. A key that `now` lacks is left
/// out.
std::vector<SettingChange>
changed_settings(const std::string& now, const std::string& before);

/// The complete configuration; load_job reads it back identically.
/// Throws ConfigError when a value is out of range.
std::string to_toml(const Job& job);

}  // namespace echelon
