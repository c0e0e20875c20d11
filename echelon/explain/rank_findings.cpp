// A straggler takes longer than its peers, the ranks with the same stages, for
// the same number of samples. It must do so by a margin and in most of the
// steps, so that one pause makes no straggler. Where there is none, but ranks
// wait for each other in collectives, either their batches are uneven or the
// slow rank changes from step to step.
#include <algorithm>
#include <map>

#include "echelon/explain/findings.h"
#include "echelon/job/pipeline_schedule.h"
#include "echelon/layout/mesh.h"
#include "echelon/layout/partition.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::explain {
namespace {

constexpr double kLeastExcess = 0.15;   // of a straggler over its peers
constexpr double kMostSteps = 2.0 / 3;  // share of steps in which it is slower
constexpr int64_t kMostRanksListed = 16;

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values.empty() ? 0 : values[values.size() / 2];
}

RunFinding measured(Fault fault, double share, double gain) {
  return {
      .fault = fault,
      .share = share,
      .gain = gain,
      .gain_source = GainSource::measured};
}

// Samples of each rank of the world in a step that begins after `steps` steps;
// empty: all have the same.
std::map<int, double> samples_of_ranks(const RunRecord& run, int64_t steps) {
  if (!run.job) return {};
  std::vector<int64_t> batches = run.job->train.rank_batch;
  for (const auto& change : run.rebalances) {
    if (change.of == timeline::Divided::samples && change.step <= steps) {
      batches = change.after;
    }
  }
  if (batches.empty()) return {};
  const Mesh mesh(run.job->layout);
  std::map<int, double> samples;
  for (int64_t rank = 0; rank < mesh.size(); ++rank) {
    const auto index = static_cast<size_t>(mesh.data_index(rank));
    if (index >= batches.size()) return {};
    samples[static_cast<int>(rank)] = static_cast<double>(batches[index]);
  }
  return samples;
}

struct Slow {
  const RankHistory* rank = nullptr;
  double excess = 0;   // over its peers' median, as a share of that
  double seconds = 0;  // by which it takes longer in a step
  double steps = 0;    // share of them in which it is slower
};

// Forward and backward, per sample where ranks have different numbers of them.
// A step is an index into RunTimes::steps.
class Work {
 public:
  explicit Work(const Evidence& evidence) {
    for (const int64_t step : evidence.times.steps) {
      samples_.push_back(samples_of_ranks(evidence.run, step));
    }
  }

  bool is_uneven() const {
    return std::ranges::any_of(samples_, [](const auto& step) {
      return std::ranges::any_of(step, [&](const auto& one) {
        return one.second != step.begin()->second;
      });
    });
  }
  double of(const RankHistory& rank, size_t step) const {
    const RankTimes& times = rank.steps[step];
    return (times.forward + times.backward) / samples(rank, step);
  }
  double samples(const RankHistory& rank, size_t step) const {
    if (step >= samples_.size()) return 1;
    const auto found = samples_[step].find(rank.rank);
    return found == samples_[step].end() ? 1 : found->second;
  }

 private:
  std::vector<std::map<int, double>> samples_;  // by step, rank
};

std::vector<const RankHistory*>
peers_of(const RankHistory& rank, const RunTimes& times) {
  std::vector<const RankHistory*> peers;
  for (const RankHistory& other : times.ranks) {
    if (other.rank != rank.rank && other.first_stage == rank.first_stage &&
        other.steps.size() == rank.steps.size()) {
      peers.push_back(&other);
    }
  }
  return peers;
}

// Compares the rank's time for a sample with the median of its peers, step by
// step. Its peers are the ranks with the same stages of the pipeline. `seconds`
// is what the others lose to it in a step.
Slow how_slow(
    const RankHistory& rank, const RunTimes& times, const Work& work) {
  Slow slow{&rank};
  const auto peers = peers_of(rank, times);
  if (peers.empty()) return slow;
  double usual = 0;
  double waits = 0;  // of the others, in all
  for (size_t step = 0; step < rank.steps.size(); ++step) {
    std::vector<double> others, whole;
    for (const RankHistory* peer : peers) {
      others.push_back(work.of(*peer, step));
      whole.push_back(others.back() * work.samples(*peer, step));
    }
    const double own = work.of(rank, step);
    const double theirs = median(others);
    if (own > theirs * (1 + kLeastExcess / 2)) slow.steps += 1;
    const double samples = work.samples(rank, step);
    slow.seconds += (own - theirs) * samples;
    usual += theirs * samples;
    waits += own * samples - median(whole);
  }
  const auto count = static_cast<double>(rank.steps.size());
  slow.steps /= count;
  slow.excess = usual > 0 ? slow.seconds / usual : 0;
  // With few samples each takes more time, but nobody waits for them.
  slow.seconds = std::min(slow.seconds, waits) / count;
  return slow;
}

// A batch that is divided by the ranks' speeds.
struct Division {
  std::vector<int64_t> samples;  // by data-parallel rank
  double now = 0;                // what the slowest rank computes in a step
  double then = 0;               // the same with this division
};

// Nothing where the run divides its batch itself, where training would be
// another, where the list would be long, or where little is gained.
std::optional<Division> division_by_speed(const Evidence& evidence) {
  const auto& job = evidence.run.job;
  if (!job || job->train.rebalance_every > 0) return {};
  const int64_t degree = job->layout.data_ranks();
  if (degree == 1 || degree > kMostRanksListed ||
      static_cast<int64_t>(evidence.times.ranks.size()) !=
          job->layout.num_ranks()) {
    return {};
  }
  const bool own_statistics =
      job->model.name.starts_with("resnet") && !job->model.sync_batch_norm;
  if (own_statistics) return {};
  auto batches = job->train.rank_batch;
  if (batches.empty()) {
    batches.assign(static_cast<size_t>(degree), job->train.batch / degree);
  }
  // Of a sample; a data-parallel rank is as slow as its slowest part.
  std::vector<double> seconds(batches.size(), 0);
  const Mesh mesh(job->layout);
  for (const RankHistory& rank : evidence.times.ranks) {
    const auto index = static_cast<size_t>(mesh.data_index(rank.rank));
    double sum = 0;
    for (size_t step = 0; step < rank.steps.size(); ++step) {
      sum += rank.steps[step].forward + rank.steps[step].backward;
    }
    seconds[index] = std::max(
        seconds[index], sum / static_cast<double>(rank.steps.size()) /
                            static_cast<double>(batches[index]));
  }
  std::vector<double> speeds;
  for (const double one : seconds) {
    if (!(one > 0)) return {};
    speeds.push_back(1 / one);
  }
  const int64_t unit =
      job->layout.pp > 1 ? microbatches_of(*job) : job->train.accumulate;
  Division division{.samples = share_out(job->train.batch / unit, speeds)};
  if (division.samples.empty()) return {};
  for (size_t i = 0; i < batches.size(); ++i) {
    division.samples[i] *= unit;
    division.now =
        std::max(division.now, seconds[i] * static_cast<double>(batches[i]));
    division.then = std::max(
        division.then, seconds[i] * static_cast<double>(division.samples[i]));
  }
  const double gain = (division.now - division.then) / evidence.times.mean.step;
  return gain >= kLeastShare ? std::optional(division) : std::nullopt;
}

std::vector<RunFinding>
find_stragglers(const Evidence& evidence, const Work& work) {
  std::vector<Slow> slow;
  for (const RankHistory& rank : evidence.times.ranks) {
    const Slow one = how_slow(rank, evidence.times, work);
    if (one.excess >= kLeastExcess && one.steps >= kMostSteps) {
      slow.push_back(one);
    }
  }
  if (slow.empty()) return {};
  const Slow most = *std::ranges::max_element(slow, {}, &Slow::seconds);
  const double step = evidence.times.mean.step;
  const double share = std::min(1.0, most.seconds / step);
  if (share < kLeastShare) return {};
  RunFinding found = measured(Fault::straggler, share, share);
  for (const Slow& one : slow) found.ranks.push_back(one.rank->rank);
  found.reason.diagnosis = format(
      "Rank {} takes {} longer for the same work than its peers, in {} of the "
      "steps{}. The others wait for it.",
      most.rank->rank, format_percent(most.excess), format_percent(most.steps),
      slow.size() > 1
          ? format(", and {} other slow ranks less", slow.size() - 1)
          : "");
  found.reason.fix = format(
      "Look at the device of rank {}: other programs on it, its clock and "
      "temperature, its cores (`echelon doctor` on its host).",
      most.rank->rank);
  if (const auto division = division_by_speed(evidence)) {
    const std::string list = join(division->samples, ", ");
    found.settings = {format("train.rank_batch=[{}]", list)};
    found.gain = std::clamp((division->now - division->then) / step, 0.0, 1.0);
    found.reason.fix += format(
        " If it stays slow, give it fewer samples: with batches of {}, the "
        "slowest rank computes for {} of a step instead of {}. On CPUs, "
        "train.rebalance_every = 20 does this while the run trains.",
        list, format_seconds(division->then), format_seconds(division->now));
  } else if (const auto& job = evidence.run.job;
             job && job->train.rebalance_every > 0) {
    found.reason.fix +=
        " The run gives it fewer samples when it has measured that "
        "(train.rebalance_every).";
  } else {
    found.reason.fix += " If it stays slow, leave it out.";
  }
  found.reason.why = format(
      "Ranks synchronise in every step, so that each is as slow as the "
      "slowest: {} of {} are lost to it.",
      format_seconds(most.seconds), format_seconds(step));
  return {found};
}

// With even batches all ranks would take the mean over ranks.
RunFinding uneven_batches(const Evidence& evidence, double share) {
  const double step = evidence.times.mean.step;
  double most = 0;
  for (const RankHistory& rank : evidence.times.ranks) {
    most = std::max(most, rank.mean.compute());
  }
  RunFinding found = measured(
      Fault::rank_imbalance, share,
      std::clamp((most - evidence.times.mean.compute()) / step, 0.0, share));
  found.settings = {"train.rank_batch=[]"};
  found.reason.diagnosis = format(
      "Ranks have different numbers of samples (train.rank_batch), and those "
      "with few wait {} of each step of {} on average.",
      format_seconds(share * step), format_seconds(step));
  found.reason.fix =
      "Give all ranks the same, or as many as their devices' speeds.";
  found.reason.why = format(
      "A sample takes these ranks the same time: the one with most computes "
      "for {}, the average one for {}.",
      format_seconds(most), format_seconds(evidence.times.mean.compute()));
  return found;
}

RunFinding changing_ranks(const Evidence& evidence, double share) {
  const double step = evidence.times.mean.step;
  RunFinding found = measured(Fault::rank_imbalance, share, share);
  found.reason.diagnosis = format(
      "In collectives, ranks wait {} of each step of {} for others that come "
      "later; not always the same ones.",
      format_seconds(share * step), format_seconds(step));
  const auto& job = evidence.run.job;
  const bool text = job && job->data.name == DataKind::text &&
                    job->data.documents == Documents::respected;
  if (text) {
    found.settings = {"data.documents=\"packed\""};
    found.reason.fix = "Pack documents, so that every sample takes the same.";
  } else {
    found.reason.fix =
        "Give each rank cores and a device that nothing else uses "
        "(train.threads, `echelon doctor`), and samples that take the same.";
  }
  found.reason.why =
      "Each step takes as long as its slowest rank; with ranks that are even, "
      "all of the wait would go.";
  return found;
}

}  // namespace

std::vector<RunFinding> find_uneven_ranks(const Evidence& evidence) {
  if (evidence.times.ranks.size() < 2) return {};
  const Work work(evidence);
  std::vector<RunFinding> all = find_stragglers(evidence, work);
  // The finding about data covers late batches.
  const bool late_data = !find_data_loading(evidence).empty();
  const double waits = evidence.shares.for_ranks;
  // A straggler explains the waits of the others, which are no second finding.
  if (!all.empty() || late_data || waits < kLeastWait) return all;
  // A batch that is divided by speed has no setting that is at fault.
  const bool uneven = work.is_uneven() && evidence.run.rebalances.empty();
  all.push_back(
      uneven ? uneven_batches(evidence, waits)
             : changing_ranks(evidence, waits));
  return all;
}

}  // namespace echelon::explain
