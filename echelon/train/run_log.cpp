#include "echelon/train/run_log.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "echelon/error.h"
#include "echelon/text/build_info.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon {

namespace {

void truncate_with_warning(const std::filesystem::path& metrics, int64_t step) {
  const std::string warning = timeline::truncate_metrics(metrics, step);
  if (!warning.empty()) {
    std::fprintf(stderr, "warning: %s\n", warning.c_str());
  }
}

// What all traces of the run have in common. The names of OpenTelemetry's
// semantic conventions where it has one.
timeline::Attributes resource_of(
    const World& world, const std::filesystem::path& metrics, const Job& job) {
  char host[256] = "";
  ::gethostname(host, sizeof host - 1);
  const std::filesystem::path run =
      std::filesystem::absolute(metrics).lexically_normal().parent_path();
  timeline::Attributes resource = {
      {"service.name", "echelon"},
      {"service.version", build_info::kVersion},
      {"service.instance.id", format("{}:{}", host, ::getpid())},
      {"host.name", host},
      {"process.pid", int64_t{::getpid()}},
      {"echelon.run", run.filename().string()},
      {"echelon.model", job.model.name},
      {"echelon.layout", to_string(job.layout)},
      {"echelon.ranks", int64_t{world.size()}},
      {"echelon.ranks_per_host", int64_t{world.local_size()}}};
  for (const Axis axis : kAxes) {
    resource.emplace_back(
        format("echelon.layout.{}", to_string(axis)), job.layout.degree(axis));
  }
  return resource;
}

}  // namespace

void print_slow_links(const Layout& layout, const Mesh& mesh, int local_size) {
  const int64_t tp = layout.tp;
  if (mesh.within_hosts(Axis::tp, local_size)) return;
  Layout usual = layout;
  usual.order = kAxes;
  const bool by_order = Mesh(usual).within_hosts(Axis::tp, local_size);
  const std::string line = format(
      "warning: [layout] tp={}: a host has {}, so that some groups of {} "
      "span several hosts; tp is fast where its ranks share a host{}\n",
      tp, counted(local_size, "rank"), tp,
      by_order ? ": name it last in [layout] order" : "");
  std::fputs(line.c_str(), stderr);
}

RunLog::RunLog(
    World& world, const std::filesystem::path& folder, int64_t log_every)
    : world_(world),
      path_(folder / "metrics.jsonl"),
      log_every_(log_every),
      recent_(log_every) {
  std::string lines;
  if (world.rank() == 0) {
    for (const auto& one : timeline::read_rollbacks(path_)) {
      lines += timeline::to_line(one);
    }
  }
  rollbacks_ = timeline::parse_rollbacks(world.exchange(lines)[0]);
}

void RunLog::restore(int64_t step) {
  if (world_.rank() == 0 && std::filesystem::exists(path_)) {
    truncate_with_warning(path_, step);
    timeline::MetricsFile before = timeline::read_metrics(path_);
    steps_ = std::move(before.steps);
    evaluations_ = std::move(before.evaluations);
    rebalances_ = std::move(before.rebalances);
  }
  const int64_t last = evaluations_.empty() ? -1 : evaluations_.back().step;
  evaluated_step_ = std::stoll(world_.exchange(std::to_string(last))[0]);
}

void RunLog::start_over() const {
  if (!std::filesystem::exists(path_)) return;
  truncate_with_warning(path_, 0);
  std::printf("the run has no checkpoint: it starts over\n");
}

void RunLog::open(int64_t total_steps, const Job& job) {
  metrics_ = std::make_unique<timeline::MetricsWriter>(path_);
  timeline::ProgressOptions options = timeline::progress_options_for(1);
  options.every = log_every_;
  progress_ = std::make_unique<timeline::Progress>(total_steps, options);
  const auto wants = [&](const char* what) {
    return std::ranges::count(job.train.log, what) > 0;
  };
  const auto folder = path_.parent_path();
  try {
    if (wants("tensorboard")) {
      events_.file = std::make_unique<timeline::EventFile>(
          folder / timeline::kEventFolder, world_.size());
      events_.file->go_on_from(steps_, evaluations_);
    }
  } catch (const Error& error) {
    message(std::string("warning: ") + error.what());
  }
  try {
    if (wants("otlp")) {
      traces_.file = std::make_unique<timeline::TraceFile>(
          folder / timeline::kTraceFolder / timeline::kTraceFile,
          resource_of(world_, path_, job), build_info::kVersion);
    }
  } catch (const Error& error) {
    message(std::string("warning: ") + error.what());
  }
}

void RunLog::add(
    const timeline::StepMetrics& metrics, const StepSums& sums,
    const timeline::Phase& time, const std::vector<timeline::Phase>& parts) {
  steps_.push_back(metrics);
  try {
    metrics_->append(metrics);
  } catch (const Error& error) {
    warn(error);
  }
  with<timeline::EventFile>(
      events_, [&](auto& events) { events.append(metrics); });
  with<timeline::TraceFile>(
      traces_, [&](auto& traces) { traces.append(metrics, time, parts); });
  recent_.add(metrics);
  progress_->update(
      {.step = metrics.step,
       .epoch = metrics.epoch,
       .loss = recent_.loss(),
       .samples_per_second = recent_.samples_per_second(),
       .tokens_per_second = recent_.tokens_per_second(),
       .slowest_rank = sums.slowest_rank,
       .slowest_excess = sums.slowest_excess,
       .loss_scale = metrics.loss_scale.value_or(0),
       .skipped_steps = metrics.skipped_steps.value_or(0)});
}

void RunLog::add(const timeline::EvaluationMetrics& metrics) {
  evaluations_.push_back(metrics);
  evaluated_step_ = metrics.step;
  if (world_.rank() != 0) return;
  try {
    metrics_->append(metrics);
    warned_ = false;
  } catch (const Error& error) {
    warn(error);
  }
  with<timeline::EventFile>(
      events_, [&](auto& events) { events.append(metrics); });
  with<timeline::TraceFile>(traces_, [&](auto& traces) {
    const int64_t now = timeline::steady_now_ns();
    timeline::Attributes attributes = {
        {"echelon.step", metrics.step}, {"echelon.loss", metrics.loss}};
    if (metrics.accuracy) {
      attributes.emplace_back("echelon.accuracy", *metrics.accuracy);
    }
    for (const auto& [name, value] : metrics.own) {
      attributes.emplace_back("echelon.metric." + name, value);
    }
    traces.append(
        {"evaluation", now - std::llround(1e9 * metrics.seconds), now},
        attributes);
  });
  message(
      "step " + std::to_string(metrics.step) + ": " +
      timeline::to_text(metrics));
}

void RunLog::add(const timeline::Phase& phase) {
  with<timeline::TraceFile>(
      traces_, [&](auto& traces) { traces.append(phase); });
}

void RunLog::add(const timeline::Rebalance& rebalance) {
  rebalances_.push_back(rebalance);
  try {
    metrics_->append(rebalance);
    warned_ = false;
  } catch (const Error& error) {
    warn(error);
  }
  message(
      (rebalance.of == timeline::Divided::layers
           ? "stages are cut anew "
           : "the batch is divided anew ") +
      timeline::to_text(rebalance));
}

void RunLog::add(const timeline::Rollback& rollback) {
  const auto is_later = [&](const auto& metrics) {
    return metrics.step > rollback.step;
  };
  rollbacks_.push_back(rollback);
  std::erase_if(steps_, is_later);
  std::erase_if(evaluations_, is_later);
  std::erase_if(rebalances_, is_later);
  if (evaluated_step_ > rollback.step) evaluated_step_ = -1;
  if (world_.rank() != 0) return;
  metrics_.reset();  // writes what it has
  truncate_with_warning(path_, rollback.step);
  timeline::append_rollback(path_, rollback);
  metrics_ = std::make_unique<timeline::MetricsWriter>(path_);
  with<timeline::EventFile>(
      events_, [&](auto& events) { events.truncate(rollback.step); });
}

void RunLog::flush() {
  try {
    metrics_->flush();
    warned_ = false;
  } catch (const Error& error) {
    warn(error);
  }
  with<timeline::EventFile>(events_, [](auto& events) { events.flush(); });
}

void RunLog::flush_or_throw() {
  with<timeline::EventFile>(events_, [](auto& events) { events.flush(); });
  with<timeline::TraceFile>(traces_, [](auto& traces) { traces.flush(); });
  metrics_->flush();
}

template <class File>
void RunLog::with(Extra<File>& extra, const std::function<void(File&)>& write) {
  if (!extra.file) return;
  try {
    write(*extra.file);
  } catch (const Error& error) {
    if (std::exchange(extra.warned, true)) return;
    message(
        std::string("warning: ") + error.what() +
        "; training goes on, and what is missing is written when it can be");
  }
}

void RunLog::warn(const Error& error) {
  if (std::exchange(warned_, true)) return;
  message(
      std::string("warning: ") + error.what() +
      "; training goes on, and what is missing is written when it can be");
}

}  // namespace echelon
