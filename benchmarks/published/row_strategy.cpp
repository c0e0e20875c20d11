#include "benchmarks/published/row_strategy.h"

#include <algorithm>
#include <cmath>
#include <regex>
#include <string>

#include "benchmarks/published/row_cluster.h"
#include "echelon/cost/step_estimate.h"
#include "echelon/error.h"

namespace echelon {
namespace {

bool contains(const std::string& text, const char* word) {
  return text.find(word) != std::string::npos;
}

struct Rule {
  const char* word;  // in source, table, notes or file
  const char* framework;
};

// In this order; the first word that is there decides.
const Rule kRules[] = {
    {"llm-foundry", "fsdp"},
    {"mosaicml", "fsdp"},
    {"composer", "fsdp"},
    {"torchtitan", "torchtitan"},
    {"maxtext", "maxtext"},
    {"paxml", "paxml"},
    {"llm.c", "llm.c"},
    {"automodel", "torchtitan"},
    {"zero-3 via deepspeed", "deepspeed"},
    {"zero bubble", "zero-bubble"},
    {"2401.10241", "zero-bubble"},
    {"accumulating gradients in fp32", "megatron-deepspeed-bf16"},
    {"vtrain", "megatron-vtrain"},
    {"megatron-deepspeed", "megatron-deepspeed"},
    {"bigscience", "megatron-deepspeed"},
    {"2104.04473", "megatron-2021"},
    {"readme jan 2021", "megatron-2021"},
    {"readme sep 2020", "megatron-2021"},
    {"nemo container", "megatron-bridge"},
    {"megatron-bridge", "megatron-bridge"},
    {"nemo-framework-launcher readme.md@tag 23", "nemo-2023"},
    {"nemo", "megatron-core"},
    {"dgxc", "megatron-core"},
    {"megatron-lm readme", "megatron-core"},
    {"2205.05198", "megatron-2022"},
};

std::string torchtitan(const std::string& text) {
  if (contains(text, "torch.compile=0")) return "torchtitan-eager";
  if (contains(text, "async_tp=1") || contains(text, "asynctp+")) {
    return "torchtitan-async-tp";
  }
  // By the date in a page's name: "llama3_h100_202506_torchtitan.md".
  static const std::regex date(R"(_20(\d\d)-?(\d\d)_)");
  std::smatch found;
  if (!std::regex_search(text, found, date)) return "torchtitan";
  const int month = 12 * std::stoi(found[1]) + std::stoi(found[2]);
  return month >= 12 * 25 + 4 ? "torchtitan-2025" : "torchtitan";
}

/// By the container's age: "26.06.01 NeMo Container".
std::string megatron_bridge(const std::string& text) {
  static const std::regex container(R"((\d\d)\.(\d\d)[0-9.]* nemo container)");
  std::smatch found;
  if (!std::regex_search(text, found, container)) return "megatron-bridge";
  const int month = 12 * std::stoi(found[1]) + std::stoi(found[2]);
  if (month >= 12 * 26 + 6) return "megatron-bridge-26.06";
  return month < 12 * 26 ? "megatron-bridge-25" : "megatron-bridge";
}

/// The authors' own schedules; those of Megatron-LM run as it runs them.
std::string zero_bubble(const StepRow& row) {
  const std::string schedule = lower(row.schedule);
  if (schedule.starts_with("1f1b")) return "megatron-2023";
  return contains(schedule, "all-reduce sync") ? "zero-bubble-synchronous"
                                               : "zero-bubble";
}

bool since_hopper(const StepRow& row) {
  const std::string device = device_of(row.gpu);
  return device.starts_with("h") || device.starts_with("gh");
}

bool since_blackwell(const StepRow& row) {
  const std::string device = device_of(row.gpu);
  return device.starts_with("b") || device.starts_with("gb");
}

/// The source is not known.
std::string usual_framework(const StepRow& row) {
  const std::string sharding = lower(row.sharding);
  if (contains(sharding, "fsdp2")) return "torchtitan";
  if (contains(sharding, "deepspeed")) return "deepspeed";
  if (contains(sharding, "fsdp") || contains(sharding, "zero3")) return "fsdp";
  if (since_blackwell(row)) return "megatron-bridge";
  if (since_hopper(row)) return "megatron-core";
  return lower(row.recompute).starts_with("sel") ? "megatron-2022"
                                                 : "megatron-2021";
}

int64_t at_least_1(int64_t degree) {
  return std::max<int64_t>(degree, 1);
}

bool is_nemo(const std::string& framework) {
  return framework == "nemo-2023" || framework == "megatron-core" ||
         framework.starts_with("megatron-bridge");
}

bool is_megatron(const std::string& framework) {
  return is_nemo(framework) || framework.starts_with("megatron") ||
         framework.starts_with("zero-bubble");
}

constexpr int64_t kMostStages = 1024;

// Megatron-LM keeps pipeline stages farthest apart: neighbours in rank are tp,
// then cp, then data, then pp.
constexpr AxisOrder kMegatronOrder = {
    Axis::pp, Axis::dp_replicate, Axis::dp_shard, Axis::ep, Axis::cp, Axis::tp};

int64_t
zero_stage(const StepRow& row, const std::string& framework, int64_t data) {
  if (data == 1) return 0;
  const std::string cell = lower(row.sharding);
  for (const int stage : {1, 2, 3}) {
    if (contains(cell, ("zero" + std::to_string(stage)).c_str()) ||
        contains(cell, ("zero-" + std::to_string(stage)).c_str())) {
      return stage;
    }
  }
  if (contains(cell, "fsdp")) return 3;
  if (contains(cell, "distributed optimizer")) return 1;
  if (!cell.empty() && cell != "ddp") {
    throw ConfigError(
        "zero_or_fsdp \"" + cell.substr(0, 40) +
        "\" is not understood: zero1, zero2, zero3 or fsdp");
  }
  // What the software does where the row says nothing.
  if (framework.starts_with("torchtitan") || framework == "fsdp" ||
      framework == "deepspeed" || framework == "paxml" ||
      framework == "maxtext") {
    return 3;
  }
  return is_nemo(framework) ? 1 : 0;
}

/// "fsdp 128 x dp 4": 128 of them share the parameters.
int64_t shard_degree(const StepRow& row, int64_t data) {
  std::smatch found;
  const std::string cell = lower(row.sharding);
  static const std::regex degrees(R"(fsdp (\d{1,6}) x dp (\d{1,6}))");
  if (!std::regex_search(cell, found, degrees)) return data;
  const int64_t shard = std::stoll(found[1]);
  return shard > 0 && data % shard == 0 ? shard : data;
}

Layout
layout_of(const StepRow& row, const std::string& framework, int64_t& zero) {
  Layout layout;
  layout.tp = at_least_1(row.tp);
  layout.pp = at_least_1(row.pp);
  layout.cp = at_least_1(row.cp);
  const int64_t inner = layout.tp * layout.pp * layout.cp;
  const std::string degrees = "tp=" + std::to_string(layout.tp) +
                              " * pp=" + std::to_string(layout.pp) +
                              " * cp=" + std::to_string(layout.cp);
  if (row.gpus % inner != 0) {
    throw ConfigError(
        degrees + " does not divide gpus=" + std::to_string(row.gpus));
  }
  const int64_t data = row.gpus / inner;
  if (row.dp > 0 && row.dp != data) {
    throw ConfigError(
        degrees + " * dp=" + std::to_string(row.dp) + " is not gpus=" +
        std::to_string(row.gpus) + ": dp would be " + std::to_string(data));
  }
  layout.ep = at_least_1(row.ep);
  // DeepEP's kernels exchange tokens, so every data rank has experts of its
  // own.
  if (row.ep == 0 && contains(row.text(), "deepep")) layout.ep = data;
  if (data % layout.ep != 0) {
    throw ConfigError(
        "ep=" + std::to_string(layout.ep) +
        " does not divide dp=" + std::to_string(data));
  }
  zero = zero_stage(row, framework, data * layout.cp);
  const int64_t rest = data / layout.ep;
  layout.dp_shard = zero > 0 ? shard_degree(row, rest) : 1;
  layout.dp_replicate = rest / layout.dp_shard;
  return layout;
}

cluster::Precision
precision_of(const StepRow& row, const std::string& framework) {
  const std::string cell = lower(row.precision);
  if (contains(cell, "fp4")) return cluster::Precision::fp4;
  if (contains(cell, "fp8") || contains(cell, "float8"))
    return cluster::Precision::fp8;
  if (contains(cell, "bf16") || contains(cell, "bfloat16"))
    return cluster::Precision::bf16;
  if (contains(cell, "fp16") || contains(cell, "float16"))
    return cluster::Precision::fp16;
  if (contains(cell, "tf32")) return cluster::Precision::tf32;
  if (contains(cell, "fp32") || contains(cell, "float32"))
    return cluster::Precision::fp32;
  if (!cell.empty()) {
    throw ConfigError(
        "precision \"" + cell.substr(0, 40) + "\" is not understood");
  }
  return contains(lower(row.gpu), "v100") || framework == "megatron-2021" ||
                 framework == "megatron-vtrain" ||
                 framework == "megatron-deepspeed"
             ? cluster::Precision::fp16
             : cluster::Precision::bf16;
}

/// Where neither schedule nor virtual stages are said: NeMo's recipes
/// interleave with a stage for every block where that divides, torchtitan's
/// with two stages a rank where its texts say interleaved.
void usual_schedule(
    const StepRow& row, const cost::ModelShape& model,
    cost::Strategy& strategy) {
  if (row.virtual_stages != 0) return;
  const int64_t pp = strategy.layout.pp;
  const int64_t layers = model.transformer->layers;
  const bool nemo = is_nemo(strategy.framework);
  const int64_t samples = row.global_batch / strategy.data_ranks();
  const int64_t count = samples / at_least_1(row.microbatch_size);
  if (nemo && layers % pp == 0 && layers > pp && count % pp == 0) {
    strategy.schedule = ScheduleKind::interleaved;
    strategy.stages_per_rank = layers / pp;
  } else if (
      strategy.framework.starts_with("torchtitan") &&
      contains(row.text(), "interleaved")) {
    strategy.schedule = ScheduleKind::interleaved;
    strategy.stages_per_rank = 2;
  }
}

/// Also sets the stages of a rank, which are Megatron's virtual stages.
void read_schedule(
    const StepRow& row, const cost::ModelShape& model,
    cost::Strategy& strategy) {
  const int64_t pp = strategy.layout.pp;
  const std::string cell = lower(row.schedule);
  strategy.schedule = row.virtual_stages > 1 ? ScheduleKind::interleaved
                                             : ScheduleKind::one_f_one_b;
  strategy.stages_per_rank = row.virtual_stages > 1 ? row.virtual_stages : 0;
  if (pp == 1) return;
  if (pp * at_least_1(row.virtual_stages) > kMostStages) {
    throw ConfigError(
        "pp=" + std::to_string(pp) + " with " +
        std::to_string(at_least_1(row.virtual_stages)) + " virtual stages: " +
        std::to_string(kMostStages) + " stages are the most");
  }
  if (cell.empty()) {
    usual_schedule(row, model, strategy);
    return;
  }
  if (cell == "1f1b-i" || contains(cell, "interleaved")) {
    strategy.schedule = ScheduleKind::interleaved;
    if (row.virtual_stages > 1) return;
    // Every block is a stage of its own; embedding and head count as one each.
    strategy.stages_per_rank =
        std::max<int64_t>(2, (model.transformer->layers + 2) / pp);
  } else if (cell.starts_with("1f1b")) {
    strategy.schedule = ScheduleKind::one_f_one_b;
  } else if (cell.starts_with("gpipe")) {
    strategy.schedule = ScheduleKind::gpipe;
  } else if (cell.starts_with("zb-1p") || cell.starts_with("zb-h1")) {
    strategy.schedule = ScheduleKind::zb_h1;
  } else if (cell.starts_with("zb-2p") || cell.starts_with("zb-h2")) {
    strategy.schedule = ScheduleKind::zb_h2;
  } else if (cell.starts_with("zb-v") || cell.starts_with("zbv")) {
    strategy.schedule = ScheduleKind::zb_v;
  } else if (cell.starts_with("dualpipe")) {
    strategy.schedule = ScheduleKind::dualpipev;
  } else if (contains(cell, "breadth")) {
    strategy.schedule = ScheduleKind::breadth_first;
  } else {
    throw ConfigError(
        "schedule \"" + cell.substr(0, 40) + "\" is not understood");
  }
}

/// False when the cell is empty.
bool read_recompute(
    const StepRow& row, const cost::ModelShape& model,
    cost::Strategy& strategy) {
  const std::string cell = lower(row.recompute);
  const int64_t layers = model.transformer->layers / strategy.layout.pp;
  if (cell.empty()) return false;
  static const std::regex some(R"(full x(\d{1,4}))");
  std::smatch found;
  if (contains(cell, "every 2nd")) {
    strategy.recompute = cost::Recompute::all;
    strategy.recompute_layers = std::max<int64_t>(1, layers / 2);
  } else if (std::regex_search(cell, found, some)) {
    strategy.recompute = cost::Recompute::all;
    strategy.recompute_layers = std::stoll(found[1]);
  } else if (cell.starts_with("full") || cell.starts_with("all")) {
    strategy.recompute = cost::Recompute::all;
  } else if (cell.starts_with("sel")) {
    strategy.recompute = cost::Recompute::selective;
  } else if (cell == "none" || cell == "no" || cell == "false") {
    strategy.recompute = cost::Recompute::none;
  } else {
    throw ConfigError(
        "recompute \"" + cell.substr(0, 40) +
        "\" is not understood: full, selective or none");
  }
  return true;
}

bool fits(
    const cost::ModelShape& model, const cost::Strategy& strategy,
    const cluster::Cluster& cluster) {
  if (!cost::check_strategy(model, strategy, cluster).empty()) return false;
  return cost::estimate_memory(model, strategy).peak_bytes() <=
         cost::usable_bytes(cluster.groups.front().node.device);
}

/// The least recompute with which it fits, and the most that is usual when none
/// does: everything, but no more than a part with NeMo, whose recipes say when
/// they do.
void choose_recompute_for(
    const cost::ModelShape& model, const cluster::Cluster& cluster,
    cost::Strategy& strategy) {
  const bool nemo = is_nemo(strategy.framework);
  for (const cost::Recompute choice : cost::kRecomputes) {
    if (nemo && choice == cost::Recompute::all) return;
    strategy.recompute = choice;
    if (fits(model, strategy, cluster)) return;
  }
}

/// Without a pipeline the largest power of two (at most 16 samples) that fits;
/// with one, a sample; torchtitan cuts a batch into as many as there are
/// stages.
void choose_microbatch(
    const StepRow& row, const cost::ModelShape& model,
    const cluster::Cluster& cluster, bool recompute_known,
    cost::Strategy& strategy) {
  const int64_t samples = row.global_batch / strategy.data_ranks();
  strategy.microbatch_size = 1;
  if (strategy.layout.pp > 1) {
    if (strategy.framework.starts_with("torchtitan")) {
      strategy.microbatch_size = at_least_1(samples / strategy.layout.pp);
    }
    return;
  }
  for (int64_t size = 16; size > 1; size /= 2) {
    if (samples % size != 0) continue;
    strategy.microbatch_size = size;
    if (!recompute_known) strategy.recompute = cost::Recompute::all;
    if (fits(model, strategy, cluster)) return;
  }
  strategy.microbatch_size = 1;
}

void check_batch(const StepRow& row, const cost::Strategy& strategy) {
  const int64_t of_step = strategy.data_ranks() * strategy.microbatch_size;
  if (row.global_batch > 0 && row.global_batch % of_step == 0) return;
  throw ConfigError(
      "global_batch=" + std::to_string(row.global_batch) +
      " is no multiple of dp=" + std::to_string(strategy.data_ranks()) +
      " * microbatch_size=" + std::to_string(strategy.microbatch_size));
}

std::string framework_by_words(const StepRow& row) {
  const std::string text = row.text();
  for (const auto& rule : kRules) {
    if (!contains(text, rule.word)) continue;
    const std::string framework = rule.framework;
    if (framework == "torchtitan") return torchtitan(text);
    if (framework == "zero-bubble") return zero_bubble(row);
    return framework == "megatron-bridge" ? megatron_bridge(text) : framework;
  }
  return usual_framework(row);
}

}  // namespace

std::string framework_of(const StepRow& row) {
  const std::string framework = framework_by_words(row);
  const std::string sharding = lower(row.sharding);
  const bool all = contains(sharding, "zero3") || contains(sharding, "zero-3");
  // Megatron-LM of 2021 shards no parameters: DeepSpeed did it for the same
  // layers.
  return all && framework == "megatron-2021" ? "deepspeed" : framework;
}

cost::Strategy strategy_of(
    const StepRow& row, const cost::ModelShape& model,
    const cluster::Cluster& cluster) {
  cost::Strategy strategy;
  strategy.framework = framework_of(row);
  strategy.layout = layout_of(row, strategy.framework, strategy.zero_stage);
  if (is_megatron(strategy.framework)) strategy.layout.order = kMegatronOrder;
  const std::string text = row.text();
  strategy.unshard_once = contains(lower(row.sharding), "no reshard");
  strategy.global_batch = row.global_batch;
  strategy.microbatch_size = row.microbatch_size;
  strategy.seq_len = row.seq;
  strategy.precision = precision_of(row, strategy.framework);
  // Composer's PURE: nothing is kept in fp32.
  if (contains(text, "mp mode pure"))
    strategy.master = cluster::Precision::bf16;
  strategy.sequence_parallel = strategy.layout.tp > 1 &&
                               (is_nemo(strategy.framework) ||
                                strategy.framework.starts_with("torchtitan") ||
                                lower(row.recompute).starts_with("sel")) &&
                               !contains(text, "no sequence parallel");
  read_schedule(row, model, strategy);
  const bool known = read_recompute(row, model, strategy);
  if (row.microbatch_size == 0) {
    choose_microbatch(row, model, cluster, known, strategy);
  }
  check_batch(row, strategy);
  if (!known) choose_recompute_for(model, cluster, strategy);
  return strategy;
}

}  // namespace echelon
