#include "echelon/monitoring/metric_page.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "echelon/monitoring/metric_text.h"
#include "echelon/text/format.h"

namespace echelon::monitoring {
namespace {

constexpr auto kMetrics = std::to_array<Metric>({
    {"echelon_start_time_seconds", "gauge", "",
     "When the launcher started, in seconds since 1970."},
    {"echelon_hosts", "gauge", "", "Hosts of the job."},
    {"echelon_ranks", "gauge", "", "Ranks of the job, on all hosts."},
    {"echelon_rank_up", "gauge", "rank, host",
     "1 while the process of the rank lives, else 0."},
    {"echelon_rank_progress_total", "counter", "rank, host",
     "How often the rank has said that it makes progress since it started."},
    {"echelon_rank_collectives_total", "counter", "rank, host",
     "Collectives that the rank has issued since it started."},
    {"echelon_rank_device", "gauge", "rank, Hostname, gpu",
     "1: the rank has this GPU, by the labels of the DCGM exporter."},
    {"echelon_memory_bytes", "gauge", "kind, rank, host",
     "Memory of the rank's process; kind resident: of the host."},
    {"echelon_restarts_total", "counter", "reason",
     "How often all ranks were started again."},
    {"echelon_recovery_seconds", "histogram", "",
     "From the end of training, by a failure or a change, to the next "
     "progress."},
    {"echelon_step", "gauge", "", "The newest step of training."},
    {"echelon_steps_total", "counter", "",
     "Steps since the launcher started, also those that were done again."},
    {"echelon_lost_steps_total", "counter", "",
     "Steps that had to be done again after training went back to an earlier "
     "state."},
    {"echelon_step_seconds", "histogram", "",
     "From the end of a step to the end of the next."},
    {"echelon_loss", "gauge", "",
     "Training loss of the newest step; NaN and infinite where it is."},
    {"echelon_grad_norm", "gauge", "",
     "2-norm of all gradients in the newest step, before clipping."},
    {"echelon_learning_rate", "gauge", "", "Learning rate of the newest step."},
    {"echelon_samples_per_second", "gauge", "",
     "Samples per second in the newest step, over all ranks."},
    {"echelon_tokens_per_second", "gauge", "",
     "Tokens per second in the newest step of a language model, over all "
     "ranks."},
    {"echelon_mfu_ratio", "gauge", "",
     "Model FLOPs utilisation in the newest step: the FLOPs of the model over "
     "those of the devices at their peak. Where a step can be predicted."},
    {"echelon_skipped_steps_total", "counter", "",
     "Steps of the run whose update was left out, since their loss or "
     "gradients were not finite."},
    {"echelon_phase_seconds_total", "counter", "phase",
     "Time of rank 0 since the launcher started. Of steps, phase data: it "
     "waited for the batch; forward and backward: passes; communication: it "
     "waited for other ranks; update: of the parameters; other: the rest. "
     "Between steps, checkpoint: training stood still; restart: no rank made "
     "progress."},
    {"echelon_effective_time_ratio", "gauge", "",
     "Time of steps that were not lost over the time since the launcher "
     "started."},
    {"echelon_checkpoint_age_seconds", "gauge", "",
     "Age of the newest whole checkpoint; without one, time since the launcher "
     "started. Only of runs that save."},
    {"echelon_checkpoint_seconds", "gauge", "",
     "How long the newest whole checkpoint took to write, where the file "
     "system tells."},
    {"echelon_device_utilization_ratio", "gauge", "gpu, UUID, Hostname",
     "Share of the last second or so in which the GPU ran a kernel, by NVML."},
    {"echelon_device_memory_bytes", "gauge", "kind, gpu, UUID, Hostname",
     "Memory of the GPU; kind used or total."},
    {"echelon_device_temperature_celsius", "gauge", "gpu, UUID, Hostname",
     "Temperature of the GPU."},
    {"echelon_device_power_watts", "gauge", "gpu, UUID, Hostname",
     "Power that the GPU draws."},
    {"echelon_device_clock_hertz", "gauge", "gpu, UUID, Hostname",
     "Clock of the GPU's multiprocessors."},
});

using Page = MetricText;

void add_ranks(Page& page, const Observed& observed) {
  const auto& ranks = observed.job.ranks;
  const auto labels = [&](const JobFacts::Rank& rank) -> Labels {
    return {{"rank", format("{}", rank.number)}, {"host", observed.host}};
  };
  page.begin("echelon_rank_up");
  for (const auto& rank : ranks) page.value(rank.up ? 1 : 0, labels(rank));
  page.begin("echelon_rank_progress_total");
  for (const auto& rank : ranks) {
    page.value(static_cast<double>(rank.progress.count), labels(rank));
  }
  page.begin("echelon_rank_collectives_total");
  for (const auto& rank : ranks) {
    page.value(static_cast<double>(rank.progress.collectives), labels(rank));
  }
  page.begin("echelon_rank_device");
  for (size_t i = 0; i < std::min(ranks.size(), observed.gpus.size()); ++i) {
    page.value(
        1, {{"rank", format("{}", ranks[i].number)},
            {"Hostname", observed.host},
            {"gpu", format("{}", observed.gpus[i].index)}});
  }
  page.begin("echelon_memory_bytes");
  for (size_t i = 0; i < std::min(ranks.size(), observed.memory.size()); ++i) {
    Labels all = {{"kind", "resident"}};
    for (auto& label : labels(ranks[i])) all.push_back(std::move(label));
    page.value(observed.memory[i], all);
  }
}

void add_run(Page& page, const Observed& observed, const RunFigures& run) {
  if (run.step) page.one("echelon_step", static_cast<double>(*run.step));
  page.one("echelon_steps_total", static_cast<double>(run.steps));
  page.one("echelon_lost_steps_total", static_cast<double>(run.lost_steps));
  page.one("echelon_step_seconds", run.step_seconds);
  page.one("echelon_loss", run.loss);
  page.one("echelon_grad_norm", run.grad_norm);
  page.one("echelon_learning_rate", run.learning_rate);
  page.one("echelon_samples_per_second", run.samples_per_second);
  page.one("echelon_tokens_per_second", run.tokens_per_second);
  const JobFacts& job = observed.job;
  if (job.peak_seconds > 0 && run.newest_seconds.value_or(0) > 0) {
    page.one("echelon_mfu_ratio", job.peak_seconds / *run.newest_seconds);
  }
  if (run.skipped_steps) {
    page.one(
        "echelon_skipped_steps_total", static_cast<double>(*run.skipped_steps));
  }
  page.begin("echelon_phase_seconds_total");
  double rest = run.step_seconds.sum;
  const auto phase = [&](std::string_view name, double seconds) {
    if (seconds > 0) page.value(seconds, {{"phase", std::string(name)}});
  };
  for (size_t i = 0; i < kStepPhases.size(); ++i) {
    phase(kStepPhases[i], run.phase_seconds[i]);
    rest -= run.phase_seconds[i];
  }
  page.value(std::max(0.0, rest), {{"phase", "other"}});
  phase("checkpoint", job.checkpoint_seconds);
  page.value(job.recoveries.sum, {{"phase", "restart"}});
  if (observed.up_seconds > 0) {
    page.one(
        "echelon_effective_time_ratio",
        std::clamp(run.kept_seconds / observed.up_seconds, 0.0, 1.0));
  }
  if (!observed.saves) return;
  using Seconds = std::chrono::duration<double>;
  page.one(
      "echelon_checkpoint_age_seconds",
      run.checkpoint
          ? std::max(
                0.0, observed.now -
                         Seconds(run.checkpoint->time_since_epoch()).count())
          : observed.up_seconds);
  page.one("echelon_checkpoint_seconds", run.checkpoint_seconds);
}

void add_gpus(Page& page, const Observed& observed) {
  const auto each = [&](auto figure, const Labels& first = {}) {
    for (const auto& gpu : observed.gpus) {
      Labels labels = first;
      labels.emplace_back("gpu", format("{}", gpu.index));
      labels.emplace_back("UUID", gpu.uuid);
      labels.emplace_back("Hostname", observed.host);
      page.value(gpu.*figure, labels);
    }
  };
  using cluster::GpuUse;
  const auto all = [&](std::string_view name, auto figure) {
    page.begin(name);
    each(figure);
  };
  all("echelon_device_utilization_ratio", &GpuUse::busy);
  page.begin("echelon_device_memory_bytes");
  each(&GpuUse::memory_used, {{"kind", "used"}});
  each(&GpuUse::memory_total, {{"kind", "total"}});
  all("echelon_device_temperature_celsius", &GpuUse::celsius);
  all("echelon_device_power_watts", &GpuUse::watts);
  all("echelon_device_clock_hertz", &GpuUse::hertz);
}

}  // namespace

std::span<const Metric> metrics() {
  return kMetrics;
}

std::string metric_page(const Observed& observed) {
  const JobFacts& job = observed.job;
  Page page(kMetrics, {{"run", observed.run}});
  page.one("echelon_start_time_seconds", observed.started);
  add_ranks(page, observed);
  add_gpus(page, observed);
  if (!job.coordinates) return page.take();
  page.one("echelon_hosts", static_cast<double>(job.num_hosts));
  page.one("echelon_ranks", static_cast<double>(job.world_size));
  page.begin("echelon_restarts_total");
  for (size_t i = 0; i < job.restarts.size(); ++i) {
    page.value(
        static_cast<double>(job.restarts[i]),
        {{"reason", to_string(static_cast<RestartReason>(i))}});
  }
  page.one("echelon_recovery_seconds", job.recoveries);
  if (observed.figures) add_run(page, observed, *observed.figures);
  return page.take();
}

}  // namespace echelon::monitoring
