// The rules run in one fixed order, and a rule may rely on those before it: the
// number of microbatches that check_pipeline() finds is what batches must
// divide by, and the data's files are read only after the rules that need none
// have passed. A rule throws at once. Its message begins with the place where
// the key was set and with the value (Document::where); errors of other
// folders, which do not know where a setting came from, get the place in front.
#include "echelon/job/check_job.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <string_view>

#include "echelon/architecture/check_weights.h"
#include "echelon/architecture/language_model.h"
#include "echelon/architecture/parameter_list.h"
#include "echelon/architecture/trained_parameters.h"
#include "echelon/cluster/host.h"
#include "echelon/error.h"
#include "echelon/job/compute_dtype.h"
#include "echelon/job/cuda_graphs.h"
#include "echelon/job/pipeline_schedule.h"
#include "echelon/layout/layout.h"
#include "echelon/layout/partition.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon {
namespace {

// Each rule is a function that throws.
std::vector<int64_t> divisors(int64_t number) {
  std::vector<int64_t> all;
  for (int64_t one = 1; one <= number; ++one) {
    if (number % one == 0) all.push_back(one);
  }
  return all;
}

class Checker {
 public:
  Checker(const Job& job, int64_t num_ranks)
      : job_(job), num_ranks_(num_ranks), document_(job.document) {
    // A job that a program made has no document of its own.
    if (document_.entries().empty()) document_ = describe(job);
  }

  // Without `data`, the files are inspected.
  JobFacts run(const std::optional<DataFacts>& data) {
    check_model_is_known(job_.model);  // the other checks ask for its layers
    check_library();
    check_layout();
    if (job_.layout.tp > 1) check_tensor_parallel();
    if (job_.layout.cp > 1) check_context_parallel();
    if (shards_parameters(job_)) check_shards();
    check_memory();
    if (job_.layout.pp > 1) check_pipeline();
    if (!job_.model.devices.empty()) check_devices();
    check_precision();
    check_non_finite();
    check_cuda_graphs();
    check_batch();
    check_rebalance();
    check_length();
    check_optimizer();
    check_comm();
    JobFacts facts;
    facts.warnings = find_unused_settings(job_);
    facts.data = data ? *data : inspect();
    const bool own_data = job_.data.name == DataKind::own;
    const bool own_model = job_.model.name == kOwnModel;
    // What a library has is known when ranks load it.
    if (!own_data) check_samples(facts);
    if (!own_model) check_kind_of_data();
    facts.classes =
        own_model || own_data ? job_.model.classes : classes(facts.data);
    facts.steps = own_data ? job_.train.steps : steps(facts.data);
    if (facts.steps > 0) check_schedule(facts.steps);
    if (!own_model && !own_data) check_model(facts);
    check_threads(facts);
    return facts;
  }

  void check_sampling() {
    for (const Axis axis : kAxes) {
      if (axis == Axis::cp || axis == Axis::tp) continue;
      if (job_.layout.degree(axis) == 1) continue;
      const std::string name(short_name(axis));
      fail(
          "layout." + name,
          "ranks of cp and tp continue a text together, and those of {} have "
          "no part in that; set {} = 1",
          name, name);
    }
    // The weights say how large the vocabulary is. It is checked with them.
    JobFacts facts;
    facts.classes = job_.layout.tp;
    const auto shape = language_model_shape(job_.model, facts.classes);
    facts.data.sample_shape = {
        std::min(job_.data.sequence, shape.max_positions)};
    check_text_model(facts, job_.layout.tp, "layout.tp");
    if (job_.layout.cp > 1) check_sequence(facts);
  }

 private:
  // `rule` and its arguments as format() takes them.
  template <class... Arguments>
  [[noreturn]] void fail(
      const std::string& key,
      std::type_identity_t<detail::FormatPattern<sizeof...(Arguments)>> rule,
      const Arguments&... arguments) {
    throw ConfigError(
        document_.where(key) + ": " +
        detail::format_arguments(
            rule.text, {detail::FormatArgument(arguments)...}));
  }

  // Where a key was set, without its value.
  std::string place(const std::string& key) const {
    const auto& place = document_.entry(key).place;
    if (!place.is_default()) return place.text() + ": ";
    return document_.name().empty() ? "" : document_.name() + ": ";
  }

  void check_library() {
    const std::string& library = job_.model.library;
    const bool used = job_.model.name == kOwnModel ||
                      job_.data.name == DataKind::own || !library.empty();
    if (!used) return;
    if (library.empty()) {
      fail(
          "data.name",
          "the data set is that of a program, which hands it to train(), or of "
          "a library; name the library in [model] library");
    }
    std::error_code error;
    if (!std::filesystem::is_regular_file(library, error)) {
      fail(
          "model.library",
          "there is no such file; build it, as `cmake --build build` does, or "
          "name the file from the folder that echelon is started in");
    }
  }

  void check_layout() {
    if (job_.layout.ep > 1) check_experts();
    if (num_ranks_ < 1) {
      throw ConfigError(format("-n {}: must be at least 1", num_ranks_));
    }
    try {
      check_world_size(job_.layout, num_ranks_);
    } catch (const ConfigError& error) {
      throw ConfigError(place("layout.dp") + error.what());
    }
  }

  void check_experts() {
    const int64_t experts = job_.model.experts;
    if (!has_experts(job_.model)) {
      fail(
          "layout.ep",
          "spreads experts over ranks, and a {} has none; use dp or fsdp, "
          "whose "
          "ranks have samples of their own too",
          job_.model.name);
    }
    if (job_.model.dense_layers >= job_.model.layers) {
      fail(
          "layout.ep",
          "spreads experts over ranks, and with [model] dense_layers = {} none "
          "of layers = {} has any; set dense_layers = {} or less, or use dp or "
          "fsdp",
          job_.model.dense_layers, job_.model.layers, job_.model.layers - 1);
    }
    if (job_.layout.ep > experts) {
      fail(
          "layout.ep",
          "each rank needs an expert, and [model] experts = {}; ep may be {} "
          "at "
          "most, dp and fsdp take the other ranks",
          experts, experts);
    }
    if (!job_.model.devices.empty()) {
      fail(
          "model.devices",
          "a rank that shares out experts with others drives one device; set "
          "either [layout] ep or devices");
    }
  }

  void check_tensor_parallel() {
    if (job_.model.devices.empty()) return;
    fail(
        "model.devices",
        "a rank that computes each layer with others drives one device; set "
        "either [layout] tp or devices");
  }

  void check_context_parallel() {
    if (!is_language_model(job_.model) && job_.model.name != kOwnModel) {
      fail(
          "layout.cp",
          "model \"{}\" has no sequence to cut; use dp, fsdp, pp or tp, or a "
          "language model such as \"gpt2\"",
          job_.model.name);
    }
    if (!job_.model.devices.empty()) {
      fail(
          "model.devices",
          "a rank that has a part of each sequence drives one device; set "
          "either [layout] cp or devices");
    }
  }

  // Whether ranks of cp have a token each, and heads where they exchange them.
  void check_sequence(const JobFacts& facts) {
    const int64_t cp = job_.layout.cp;
    const int64_t sequence = facts.data.sample_shape[0];
    if (sequence < cp) {
      fail(
          "layout.cp",
          "a sequence has {}, and each rank needs one; cp may be {} at most",
          counted(sequence, "token"), sequence);
    }
    check_exchange_of_heads(
        language_model_shape(job_.model, facts.classes).heads);
  }

  void check_exchange_of_heads(int64_t all_heads) {
    const ContextParallelOptions& context = job_.context;
    const int64_t cp = job_.layout.cp;
    const bool grouped = context.way == ContextWay::ulysses_ring;
    if (grouped && context.ulysses > 0 && cp % context.ulysses != 0) {
      fail(
          "layout.context_ulysses",
          "cp = {} does not divide into groups of {}; it divides into groups "
          "of {}",
          cp, context.ulysses, join(divisors(cp), ", "));
    }
    const int64_t heads = all_heads / job_.layout.tp;
    const int64_t ranks = head_ranks(context, cp);
    if (ranks <= heads) return;
    fail(
        grouped ? "layout.context_ulysses" : "layout.cp",
        "context = \"{}\" gives each of {} ranks a head, but the model has "
        "heads={}{}; set context = \"ring\" or \"all_gather\", which take any "
        "number of heads, or {} of at most {}",
        to_string(context.way), ranks, all_heads,
        job_.layout.tp > 1
            ? format(", {} for a rank of tp={}", heads, job_.layout.tp)
            : "",
        grouped ? "context_ulysses" : "cp", heads);
  }

  // The setting because of which parameters are in shards.
  std::string shards_key() const {
    if (job_.layout.dp_shard > 1) return "layout.fsdp";
    if (in_16_bits(job_.precision.compute)) return "precision.compute";
    if (job_.precision.reduce != ReduceDtype::same) return "precision.reduce";
    return "memory.offload";
  }

  void check_shards() {
    const std::string key = shards_key();
    const size_t dot = key.find('.');
    const std::string name = key.substr(dot + 1);
    if (!job_.model.devices.empty()) {
      fail(
          key,
          "is for ranks that drive one device, and [model] devices "
          "has {}; leave devices out, with [layout] pp to partition "
          "the list of layers, or leave {} out",
          job_.model.devices.size(), name);
    }
    if (job_.train.compress != Compression::none) {
      fail(
          "train.compress",
          "is for unsharded gradients, and with [{}] {} they are sharded; "
          "set [precision] reduce = \"bf16\" instead, which sends half of "
          "the bytes",
          key.substr(0, dot), name);
    }
  }

  void check_memory() {
    if (job_.memory.recompute == Recompute::budget &&
        job_.memory.activation_bytes == 0) {
      fail(
          "memory.recompute",
          "needs activation_bytes, what a rank may keep for backward; set it, "
          "or recompute = \"selective\"");
    }
  }

  void check_pipeline() {
    if (job_.train.accumulate > 1) {
      fail(
          "train.accumulate",
          "a pipeline accumulates over its microbatches; leave it out and set "
          "[layout] microbatches");
    }
    if (!job_.model.devices.empty()) {
      fail(
          "model.devices",
          "a rank of a pipeline drives one device; set either [layout] pp or "
          "devices");
    }
    Schedule schedule;
    try {
      schedule = pipeline_schedule(job_);
    } catch (const ConfigError& error) {
      throw ConfigError(
          place(
              job_.pipeline.schedule_file.empty() ? "layout.schedule"
                                                  : "layout.schedule_file") +
          error.what());
    }
    microbatches_ = schedule.num_microbatches;
    check_device_bytes(job_.layout.pp, "pipeline ranks");
    check_partition(
        "layout.pp", schedule.num_stages(),
        schedule.num_stages() == job_.layout.pp
            ? "stages"
            : format(
                  "stages, {} on each rank",
                  schedule.num_stages() / job_.layout.pp));
  }

  // Whether the model's layers can be partitioned into so many slices.
  void check_partition(
      const std::string& key, int64_t slices, const std::string& what) {
    if (job_.model.name == kOwnModel) return;  // ranks know its layers
    const auto layers = list_layers(job_.model);
    const auto count = static_cast<int64_t>(layers.size());
    if (slices > count) {
      fail(
          key, "makes {} {}, but {} has {}; at most {}", slices, what,
          job_.model.name, counted(count, "layer"), count);
    }
    if (job_.model.partition_at.empty()) return;
    try {
      partition_at(
          layers, job_.model.partition_at, static_cast<size_t>(slices));
    } catch (const ConfigError& error) {
      throw ConfigError(place("model.cut") + "[model] " + error.what());
    }
  }

  void check_device_bytes(int64_t count, const std::string& what) {
    const auto entries = static_cast<int64_t>(job_.model.device_bytes.size());
    if (entries == 0 || entries == count) return;
    fail(
        "model.device_bytes",
        "must have an entry for each of the {} {}, or none", count, what);
  }

  void check_devices() {
    const auto& model = job_.model;
    // This folder is free of LibTorch, so the driver's device file tells
    // whether the machine has GPUs.
    const bool gpus = ::access("/dev/nvidiactl", F_OK) == 0;
    for (const auto& device : model.devices) {
      const bool cuda =
          device.rfind("cuda:", 0) == 0 && device.size() > 5 &&
          device.size() < 9 &&
          device.find_first_not_of("0123456789", 5) == std::string::npos;
      if (device != "cpu" && !cuda) {
        fail(
            "model.devices",
            "\"{}\" is not a device; write \"cpu\" or \"cuda:0\"", device);
      }
      if (cuda && job_.layout.dp_replicate > 1) {
        fail(
            "model.devices",
            "each of the {} ranks of dp would put its layers on the same GPUs; "
            "set [layout] pp instead of devices, or leave dp out",
            job_.layout.dp_replicate);
      }
      if (cuda && !gpus) {
        fail(
            "model.devices",
            "this machine shows no NVIDIA GPU; use \"cpu\", once for each "
            "slice of the model");
      }
    }
    check_device_bytes(static_cast<int64_t>(model.devices.size()), "devices");
    check_partition(
        "model.devices", static_cast<int64_t>(model.devices.size()), "slices");
  }

  void check_precision() {
    const ComputeDtype compute = job_.precision.compute;
    const bool tf32 = compute == ComputeDtype::tf32;
    if (job_.comm.device == DeviceKind::cpu) check_compute_on_processor(job_);
    if ((tf32 || in_16_bits(compute)) &&
        job_.model.dtype == ModelDtype::float64) {
      fail(
          "precision.compute",
          "[model] dtype = \"float64\" would be rounded to it in each layer; "
          "set dtype = \"float32\", or compute = \"same\"");
    }
    check_fp8();
  }

  void check_fp8() {
    if (job_.precision.compute != ComputeDtype::fp8) return;
    if (is_language_model(job_.model)) return;
    fail(
        "precision.compute",
        "is for the linear layers of language models; set compute = \"bf16\"");
  }

  // The forward and backward passes of one step, each on its part of the batch.
  int64_t passes_per_step() const {
    return job_.layout.pp > 1 ? microbatches_ : job_.train.accumulate;
  }

  void check_non_finite() {
    if (job_.train.on_non_finite != OnNonFinite::stop &&
        job_.train.compress == Compression::powersgd) {
      fail(
          "train.on_non_finite",
          "powersgd adds the rounding error of one step to the next, so one "
          "NaN stays in all that follow; set [train] compress to bf16, fp16 or "
          "none");
    }
  }

  void check_cuda_graphs() {
    if (job_.train.cuda_graphs != CudaGraphs::on) return;
    const std::string why = why_not_captured(job_);
    if (why.empty()) return;
    fail(
        "train.cuda_graphs",
        "this job's steps cannot be captured: {}; set cuda_graphs = \"auto\", "
        "which runs them eagerly",
        why);
  }

  void check_batch() {
    const auto& train = job_.train;
    const int64_t degree = job_.layout.data_ranks();
    if (!train.rank_batch.empty()) return check_rank_batch();
    int64_t divisor = 0;
    // A batch is at most 2^30 (options/bind.cpp). Where the divisor is larger,
    // no batch is large enough, and only fewer passes help.
    if (__builtin_mul_overflow(degree, passes_per_step(), &divisor) ||
        divisor > train.batch) {
      fail(
          "train.batch", "is less than 1 sample for each of {}; {}",
          shares(degree),
          divisor > 0 && divisor <= 1 << 30
              ? format("the smallest batch is {}", divisor)
              : "lower " + passes_name());
    }
    if (train.batch % divisor == 0) return;
    const int64_t below = train.batch / divisor * divisor;
    fail(
        "train.batch", "does not divide by {}{}; {} or {} does", shares(degree),
        degree > 1 && passes_per_step() > 1 ? format(" = {}", divisor) : "",
        below, below + divisor);
  }

  static std::string ranks(int64_t degree) {
    return format("{} {}", degree, degree == 1 ? "rank" : "ranks");
  }
  // "2 ranks * microbatches 4", "microbatches 4"
  std::string shares(int64_t degree) const {
    const int64_t passes = passes_per_step();
    if (passes == 1) return ranks(degree);
    const std::string name = format("{} {}", passes_name(), passes);
    return degree == 1 ? name : format("{} * {}", ranks(degree), name);
  }
  std::string passes_name() const {
    return job_.layout.pp > 1 ? "microbatches" : "accumulate";
  }

  void check_rank_batch() {
    const auto& train = job_.train;
    const int64_t degree = job_.layout.data_ranks();
    const auto entries = static_cast<int64_t>(train.rank_batch.size());
    if (entries != degree) {
      fail(
          "train.rank_batch", "has {} entries for {}; give one for each",
          entries, ranks(degree));
    }
    int64_t sum = 0;
    for (int64_t batch : train.rank_batch) {
      if (__builtin_add_overflow(sum, batch, &sum)) {
        fail("train.rank_batch", "its sum is larger than a whole number is");
      }
    }
    if (sum != train.batch) {
      fail(
          "train.rank_batch",
          "sums to {}, but batch is {}; set batch = {} "
          "or change the entries",
          sum, train.batch, sum);
    }
    for (int64_t batch : train.rank_batch) {
      if (batch % passes_per_step() != 0) {
        fail(
            "train.rank_batch", "{} does not divide by {} {}; each entry must",
            batch, passes_name(), passes_per_step());
      }
    }
  }

  // Only statistics of batch norms depend on which rank has a sample.
  void check_rebalance() {
    const auto& train = job_.train;
    if (train.rebalance_every == 0 ||
        (job_.layout.data_ranks() == 1 && job_.layout.pp == 1)) {
      return;
    }
    if (job_.comm.device == DeviceKind::cuda) {
      fail(
          "train.rebalance_every",
          "how long a rank works is measured on CPUs, and device is \"cuda\"; "
          "set "
          "rank_batch, as `echelon explain` says after a run, or leave it out");
    }
    if (job_.layout.data_ranks() == 1) return;
    if (!job_.model.name.starts_with("resnet")) return;
    if (!job_.model.sync_batch_norm) {
      fail(
          "train.rebalance_every",
          "each rank normalizes by its own samples, so that training would "
          "depend on how many it has; set [model] sync_batch_norm = true, or "
          "leave it out");
    }
    if (passes_per_step() > 1) {
      fail(
          "train.rebalance_every",
          "a batch is normalized pass by pass, so that training would depend "
          "on which rank has a sample; set {} = 1, or leave it out",
          passes_name());
    }
  }

  void check_length() {
    const auto& train = job_.train;
    if (train.steps > 0 && train.epochs > 0) {
      fail(
          "train.epochs",
          "steps = {} is set too; exactly one of the two "
          "says how long the run is",
          train.steps);
    }
    if (train.steps == 0 && train.epochs == 0) {
      fail(
          "train.steps",
          "neither steps nor epochs says how long the run is; set one, as in "
          "steps = 100");
    }
  }

  void check_optimizer() {
    const auto& optimizer = job_.optimizer;
    if (optimizer.name == OptimizerKind::sgd && optimizer.nesterov &&
        optimizer.momentum == 0) {
      fail(
          "optimizer.nesterov",
          "needs momentum above 0; set momentum = 0.9 or leave nesterov out");
    }
    if (optimizer.schedule == RateSchedule::step && optimizer.step_every == 0) {
      fail(
          "optimizer.schedule",
          "needs step_every, the steps between two drops; set it to 1 or more");
    }
  }

  void check_comm() {
    const auto& comm = job_.comm;
    if (comm.backend == BackendKind::nccl && comm.device == DeviceKind::cpu) {
      fail(
          "comm.backend",
          "is for GPUs, but device = \"cpu\"; leave one of them out");
    }
    const bool moves_host_memory =
        comm.backend == BackendKind::local || comm.backend == BackendKind::gloo;
    if (comm.device == DeviceKind::cuda && moves_host_memory) {
      fail(
          "comm.device",
          "GPUs need backend \"nccl\"; leave backend out, or set device = "
          "\"cpu\"");
    }
    const bool gpus = ::access("/dev/nvidiactl", F_OK) == 0;
    if (comm.backend == BackendKind::nccl && comm.device != DeviceKind::test &&
        !gpus) {
      fail(
          "comm.backend",
          "this machine shows no NVIDIA GPU; use \"local\", \"gloo\" or "
          "\"auto\"");
    }
    if (comm.device == DeviceKind::cuda && !gpus) {
      fail(
          "comm.device",
          "this machine shows no NVIDIA GPU; use \"cpu\" or \"auto\"");
    }
  }

  DataFacts inspect() {
    const auto& data = job_.data;
    if (data.name == DataKind::own) {
      return {.describe = "own, of " + job_.model.library};
    }
    const bool from_disk =
        data.name == DataKind::tensors || data.name == DataKind::images;
    if (from_disk && data.path.empty()) {
      fail(
          "data.name", "{}",
          data.name == DataKind::images
              ? "needs path, a folder of class folders"
              : "needs path, a .safetensors file with inputs and targets");
    }
    try {
      return inspect_data(data);
    } catch (const DataError& error) {
      throw DataError(data_place(error.what()) + error.what());
    } catch (const ConfigError& error) {
      throw ConfigError(settings_place(error.what()) + error.what());
    }
  }

  // A message about a setting of texts begins with the key. Returns who set it.
  std::string settings_place(const std::string& message) const {
    const auto& data = job_.data;
    if (data.name == DataKind::text) {
      for (const char* key :
           {"weights", "sequence", "token_bytes", "tokenizer", "vocab_size",
            "documents", "end_of_text_id", "chat_template", "path"}) {
        const std::string full = format("data.{}", key);
        if (message.starts_with(format("[data] {}", key)) &&
            !document_.entry(full).place.is_default()) {
          return place(full);
        }
      }
      return place("data.name");
    }
    const bool from_disk =
        data.name == DataKind::tensors || data.name == DataKind::images;
    return place(
        data.holdout_path.empty() || from_disk ? "data.name"
                                               : "data.holdout_path");
  }

  // A message about a file begins with its path. Returns who named it.
  std::string data_place(const std::string& message) const {
    const auto& data = job_.data;
    const auto begins_with = [&](const std::string& path) {
      return !path.empty() && message.starts_with(path);
    };
    // One path may be the beginning of the other: the longer one is meant.
    const bool holdout = begins_with(data.holdout_path) &&
                         data.holdout_path.size() >= data.path.size();
    if (data.name == DataKind::text && !holdout) {
      if (begins_with(data.tokenizer)) return place("data.tokenizer");
      if (data.path.empty()) return place("data.sources");
    }
    return document_.where(holdout ? "data.holdout_path" : "data.path") + ": ";
  }

  void check_samples(const JobFacts& facts) {
    const auto& data = facts.data;
    if (data.num_train < job_.train.batch) {
      fail(
          "train.batch",
          "there {} to train on ({} held out); a batch must not be larger",
          data.num_train == 1 ? "is 1 sample"
                              : format("are {} samples", data.num_train),
          data.num_holdout);
    }
  }

  void check_kind_of_data() {
    // list_parameters checks the reverse.
    if (job_.data.name != DataKind::text || is_language_model(job_.model))
      return;
    fail(
        "data.name",
        "is for models that predict the next token, and model \"{}\" is a "
        "classifier; set [model] name = \"gpt2\", say, or use other data",
        job_.model.name);
  }

  int64_t classes(const DataFacts& data) {
    if (is_language_model(job_.model)) {
      try {
        return vocabulary(job_.model, data.classes);
      } catch (const ConfigError& error) {
        throw ConfigError(place("model.vocab_size") + error.what());
      }
    }
    const int64_t classes = job_.model.classes;
    if (classes == 0) return data.classes;
    if (classes < data.classes) {
      fail(
          "model.classes",
          "the data has {}; set at least as many, "
          "or 0 to take the data's",
          counted(data.classes, "class"));
    }
    return classes;
  }

  int64_t steps(const DataFacts& data) const {
    if (job_.train.steps > 0) return job_.train.steps;
    const int64_t batches = batches_per_epoch(
        data.num_train, job_.train.batch, job_.data.drop_last);
    int64_t steps = 0;
    if (__builtin_mul_overflow(batches, job_.train.epochs, &steps)) {
      throw ConfigError(
          document_.where("train.epochs") +
          ": is more steps than can be counted; lower it");
    }
    return steps;
  }

  void check_schedule(int64_t steps) {
    const auto& optimizer = job_.optimizer;
    if (optimizer.warmup_steps > 0 && optimizer.warmup_steps >= steps) {
      fail(
          "optimizer.warmup_steps",
          "the run has {}, so the warmup would never end; lower it",
          counted(steps, "step"));
    }
  }

  // Patterns of names match some parameter, and leave some to train. Returns
  // the names of those that do not.
  std::set<std::string>
  check_frozen(const std::vector<ParameterInfo>& parameters) {
    std::set<std::string> frozen;
    try {
      frozen = frozen_parameters(job_.model, parameters);
    } catch (const ConfigError& error) {
      throw ConfigError(place("model.freeze") + error.what());
    }
    if (job_.layout.ep > 1) check_frozen_experts(parameters, frozen);
    return frozen;
  }

  // The ranks of ep, which have different experts, send each other gradients:
  // what trains of one expert of a block trains of all.
  void check_frozen_experts(
      const std::vector<ParameterInfo>& parameters,
      const std::set<std::string>& frozen) {
    std::map<std::string, std::vector<std::string>> alike;
    for (const auto& info : parameters) {
      const auto expert = expert_of(info.name);
      if (!expert) continue;
      std::string shared = info.name;
      const std::string number = format(".experts.{}.", *expert);
      shared.replace(shared.find(number), number.size(), ".experts.*.");
      alike[shared].push_back(info.name);
    }
    for (const auto& [shared, names] : alike) {
      if (std::ssize(names) < job_.model.experts) {
        const std::string layers =
            shared.substr(0, shared.size() - kAdapterA.size());
        fail(
            "lora.targets",
            "gives {} of {} experts an adapter at \"{}\", and ranks share out "
            "the experts of a block (ep = {}); name all of them, or set ep = 1",
            names.size(), job_.model.experts, layers, job_.layout.ep);
      }
      for (const auto& name : names) {
        if (frozen.contains(name) == frozen.contains(names.front())) continue;
        fail(
            "model.freeze",
            "freezes one of \"{}\" and \"{}\", and ranks share out the experts "
            "of a block (ep = {}); freeze \"{}\", or set ep = 1",
            names.front(), name, job_.layout.ep, shared);
      }
    }
  }

  void check_model(JobFacts& facts) {
    std::vector<ParameterInfo> parameters;
    try {
      parameters =
          list_parameters(job_.model, facts.data.sample_shape, facts.classes);
    } catch (const ConfigError& error) {
      const bool of_adapters =
          std::string_view(error.what()).starts_with("[lora]");
      throw ConfigError(
          place(of_adapters ? "lora.targets" : "model.name") + error.what());
    }
    if (is_language_model(job_.model)) {
      // A fault that the model has without any sharding is not blamed on tp.
      check_text_model(facts, 1, "model.name");
      check_text_model(facts, job_.layout.tp, "layout.tp");
      if (job_.layout.cp > 1) check_sequence(facts);
    } else {
      check_widths(parameters);
    }
    count_parameters(facts, parameters, check_frozen(parameters));
    if (!job_.model.weights.empty()) {
      check_weights(
          job_.model.weights, parameters, document_.where("model.weights"));
    }
  }

  void count_parameters(
      JobFacts& facts, const std::vector<ParameterInfo>& parameters,
      const std::set<std::string>& frozen) const {
    facts.num_parameters = num_parameters(parameters);
    const bool adapters_alone = saves_adapters_alone(job_.model);
    std::vector<ParameterInfo> trained, saved;
    for (const auto& info : parameters) {
      if (!frozen.contains(info.name)) trained.push_back(info);
      if (!adapters_alone || is_adapter(info.name)) saved.push_back(info);
    }
    facts.num_trained = num_parameters(trained);
    facts.num_saved = num_parameters(saved);
  }

  // Each rank computes some of a layer's outputs. The last layer, which gives
  // the scores, is sharded by its inputs.
  void check_widths(const std::vector<ParameterInfo>& parameters) {
    std::vector<int64_t> widths;
    for (const auto& parameter : parameters) {
      if (parameter.shape.size() > 1) widths.push_back(parameter.shape[0]);
    }
    if (widths.size() < 2) return;
    const int64_t least = *std::min_element(widths.begin(), widths.end() - 1);
    if (job_.layout.tp <= least) return;
    fail(
        "layout.tp",
        "the narrowest layer of {} has {} outputs to shard; "
        "tp may be {} at most",
        job_.model.name, least, least);
  }

  // `key`: the setting that errors name.
  void
  check_text_model(const JobFacts& facts, int64_t tp, const std::string& key) {
    try {
      check_language_model(
          job_.model, facts.classes, facts.data.sample_shape[0], tp);
    } catch (const ConfigError& error) {
      throw ConfigError(place(key) + error.what());
    }
  }

  void check_threads(JobFacts& facts) {
    const int64_t cores = cluster::available_cores();
    if (job_.train.threads > cores) {
      facts.warnings.push_back(format(
          "{}: more than the {} that it may use here; it will be slower",
          document_.where("train.threads"), counted(cores, "core")));
    }
  }

  const Job& job_;
  int64_t num_ranks_;
  config::Document document_;
  int64_t microbatches_ = 1;
};

}  // namespace

JobFacts check_job(const Job& job, int64_t num_ranks) {
  return Checker(job, num_ranks).run({});
}

JobFacts check_job(const Job& job, int64_t num_ranks, const DataFacts& data) {
  return Checker(job, num_ranks).run(data);
}

void check_sampling(const Job& job) {
  Checker(job, job.layout.num_ranks()).check_sampling();
}

}  // namespace echelon
