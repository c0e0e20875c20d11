#include "echelon/watch/run_view.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "echelon/text/units.h"

namespace echelon::watch {

std::string_view to_string(RunState state) {
  constexpr std::string_view kNames[] = {"not begun", "starting", "training",
                                         "silent",    "finished", "stopped",
                                         "failed",    "died",     "unknown"};
  return kNames[static_cast<size_t>(state)];
}

bool is_over(RunState state) {
  return state == RunState::finished || state == RunState::stopped ||
         state == RunState::failed || state == RunState::died;
}

bool is_bad(RunState state) {
  return state == RunState::failed || state == RunState::died ||
         state == RunState::silent;
}

void CurvePoints::add(double x, double y) {
  if (!std::isfinite(x) || !std::isfinite(y)) return;
  if (open_ == 0 || points_.empty()) {
    if (points_.size() == kMost) {
      for (size_t i = 0; i + 1 < kMost; i += 2) {
        points_[i / 2] = {
            (points_[i].x + points_[i + 1].x) / 2,
            (points_[i].y + points_[i + 1].y) / 2};
      }
      points_.resize(kMost / 2);
      stride_ *= 2;
    }
    points_.push_back({x, y});
    open_ = 1;
  } else {
    ++open_;
    Point& last = points_.back();
    last.x += (x - last.x) / static_cast<double>(open_);
    last.y += (y - last.y) / static_cast<double>(open_);
  }
  if (open_ >= stride_) open_ = 0;
}

namespace {

using ViewJson = nlohmann::ordered_json;

// JSON has no NaN.
ViewJson number(double value) {
  if (std::isfinite(value)) return value;
  return format_number(value);
}

ViewJson json_of(const RankView& rank) {
  const auto& status = rank.status;
  ViewJson json = {
      {"rank", status.rank},
      {"host", rank.host},
      {"pid", status.pid},
      {"state", rank.state},
      {"in_doubt", rank.in_doubt}};
  if (status.resident_bytes) json["resident_bytes"] = *status.resident_bytes;
  if (status.gpu) json["gpu"] = *status.gpu;
  if (status.gpu_busy) json["gpu_busy"] = *status.gpu_busy;
  if (status.gpu_memory_used) json["gpu_memory_used"] = *status.gpu_memory_used;
  if (status.gpu_memory_total) {
    json["gpu_memory_total"] = *status.gpu_memory_total;
  }
  return json;
}

ViewJson json_of(const LastStep& last) {
  ViewJson ranks = ViewJson::array();
  for (const auto& rank : last.diagnosis.ranks) {
    ranks.push_back(
        {{"rank", rank.rank},
         {"step_seconds", rank.step_seconds},
         {"compute_seconds", rank.compute_seconds},
         {"overlapped_seconds", rank.overlapped_seconds},
         {"exposed_seconds", rank.exposed_seconds},
         {"data_seconds", rank.data_seconds},
         {"idle_seconds", rank.idle_seconds}});
  }
  return {
      {"step", last.step},
      {"age_seconds", last.age_seconds},
      {"ranks", std::move(ranks)}};
}

ViewJson json_of(const CurvePoints& curve) {
  ViewJson json = ViewJson::array();
  for (const auto& [x, y] : curve.points()) json.push_back({x, y});
  return json;
}

}  // namespace

std::string format_flops(double flops_per_second) {
  if (flops_per_second >= 1e12) {
    return format_number(flops_per_second / 1e12) + " TFLOP/s";
  }
  return format_number(flops_per_second / 1e9) + " GFLOP/s";
}

std::string to_json(const RunView& view, bool curves) {
  ViewJson json = {
      {"run", view.path},
      {"name", view.name},
      {"title", view.title},
      {"layout", view.layout},
      {"state", to_string(view.state)},
      {"why", view.why}};
  if (view.total_steps > 0) json["total_steps"] = view.total_steps;
  if (view.last) {
    json["step"] = view.last->step;
    json["epoch"] = view.last->epoch;
    json["loss"] = number(view.last->loss);
    json["mean_loss"] = number(view.loss);
    json["samples_per_second"] = view.samples_per_second;
    if (view.tokens_per_second > 0) {
      json["tokens_per_second"] = view.tokens_per_second;
    }
    json["step_seconds"] = view.step_seconds;
    json["data_share"] = view.data_share;
    json["learning_rate"] = number(view.last->learning_rate);
    if (view.last->grad_norm) json["grad_norm"] = number(*view.last->grad_norm);
  }
  if (view.flops_per_second) json["flops_per_second"] = *view.flops_per_second;
  if (view.mfu) json["mfu"] = *view.mfu;
  if (view.eta_seconds) json["eta_seconds"] = *view.eta_seconds;
  if (view.quiet_seconds) json["quiet_seconds"] = *view.quiet_seconds;
  if (view.evaluation) {
    json["evaluation"] = {
        {"step", view.evaluation->step},
        {"loss", number(view.evaluation->loss)}};
    if (view.evaluation->accuracy) {
      json["evaluation"]["accuracy"] = number(*view.evaluation->accuracy);
    }
  }
  if (view.checkpoint) {
    json["checkpoint"] = {
        {"step", view.checkpoint->step},
        {"age_seconds", view.checkpoint->age_seconds}};
  }
  json["restarts"] = view.restarts;
  if (!view.failure.empty()) json["failure"] = view.failure;
  json["ranks"] = ViewJson::array();
  for (const auto& rank : view.ranks) json["ranks"].push_back(json_of(rank));
  if (view.last_step) json["last_step"] = json_of(*view.last_step);
  json["findings"] = view.findings;
  if (!view.note.empty()) json["note"] = view.note;
  if (curves) {
    json["losses"] = json_of(view.losses);
    json["speeds"] = json_of(view.speeds);
  }
  return json.dump(-1, ' ', false, ViewJson::error_handler_t::replace);
}

}  // namespace echelon::watch
