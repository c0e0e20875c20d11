#include "echelon/job/job.h"

#include "echelon/error.h"
#include "echelon/options/bind.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

void bind_all(config::Document& document, Job& job) {
  const auto table = [&](const char* name, const char* help, auto& options) {
    auto section = document.section(name, help);
    bind(section, options);
  };
  table("model", "what is trained", job.model);
  table("data", "what it is trained on", job.data);
  auto layout = document.section(
      "layout", "how many ranks along each axis of the mesh, and the pipeline");
  bind(layout, job.layout);
  bind(layout, job.pipeline);
  bind(layout, job.tensor);
  table(
      "shard", "what the ranks of fsdp shard, and when it is unsharded",
      job.shard);
  table("memory", "what is kept for backward, and where", job.memory);
  table(
      "precision", "number types of forward, backward and reductions",
      job.precision);
  table("optimizer", "how the parameters change", job.optimizer);
  table("train", "the loop", job.train);
  table("checkpoint", "when training is saved and resumed", job.checkpoint);
  table("comm", "how ranks talk to each other", job.comm);
}

void set_layout(config::Document& document, const std::string& text) {
  const Layout layout = parse_layout(text);
  const std::string flag = "--layout " + text;
  document.clear("layout", degree_keys());
  document.clear("layout", {"order"});
  const auto set = [&](std::string_view key, config::Value value) {
    document.set("layout", std::string(key), std::move(value), flag);
  };
  for (const Axis axis : kAxes) {
    const int64_t degree = layout.degree(axis);
    // dp says who set the layout, even when it is 1.
    if (degree == 1 && axis != Axis::dp_replicate) continue;
    set(short_name(axis), config::Value(degree));
  }
  if (layout.order != kAxes) {
    set("order", config::Value(order_names(layout.order)));
  }
}

void apply(config::Document& document, const Overrides& overrides) {
  for (const auto& assignment : overrides.set) document.set(assignment);
  if (!overrides.layout.empty()) set_layout(document, overrides.layout);
  if (overrides.num_ranks > 0 && !document.has_keys("layout", degree_keys())) {
    document.set(
        "layout", "dp", config::Value(overrides.num_ranks),
        format("-n {}", overrides.num_ranks));
  }
  if (!overrides.ranks.empty()) {
    document.set(
        "train", "ranks", config::Value(overrides.ranks),
        "--ranks " + overrides.ranks);
  }
  if (overrides.overwrite) {
    document.set("train", "overwrite", config::Value(true), "--overwrite");
  }
  if (!overrides.resume.empty()) {
    document.set(
        "checkpoint", "resume", config::Value(overrides.resume),
        "--resume " + overrides.resume);
  }
}

Job bound(config::Document document) {
  Job job;
  bind_all(document, job);
  document.finish();
  job.document = std::move(document);
  return job;
}

}  // namespace

bool shards_parameters(const Job& job) {
  return job.layout.dp_shard > 1 ||
         job.precision.compute != ComputeDtype::same ||
         job.memory.offload != Offload::none ||
         (job.precision.reduce != ReduceDtype::same &&
          job.layout.data_degree() > 1);
}

bool adds_gradients(const Job& job) {
  const bool low = job.precision.compute != ComputeDtype::same;
  const bool passes = job.train.accumulate > 1 || job.layout.pp > 1;
  return job.layout.data_degree() > 1 || (low && passes);
}

Job load_job(const std::string& path, const Overrides& overrides) {
  auto document = config::Document::read(path);
  apply(document, overrides);
  return bound(std::move(document));
}

Job parse_job(const std::string& text, const std::string& name) {
  return bound(config::Document::parse(text, name));
}

config::Document describe(Job job) {
  config::Document document;
  bind_all(document, job);
  document.finish();
  return document;
}

std::string to_toml(const Job& job) {
  return describe(job).to_toml();
}

}  // namespace echelon
