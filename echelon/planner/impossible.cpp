#include "echelon/planner/impossible.h"

#include <algorithm>
#include <optional>
#include <set>

#include "echelon/cost/step_estimate.h"
#include "echelon/text/units.h"

namespace echelon {
namespace {

constexpr size_t kMostValues = 24;

bool has_strategy(const SearchJob& job) {
  return !list_groups(job).empty();
}

// Leaves out what is not needed for there to be no strategy.
Constraints smallest_conflict(SearchJob job) {
  Constraints conflict = job.constraints;
  for (size_t i = conflict.size(); i-- > 0;) {
    job.constraints = conflict.without(i);
    if (!has_strategy(job)) conflict = job.constraints;
  }
  return conflict;
}

// Around the batch, the nearest that some layout divides.
std::string nearest_batches(SearchJob job) {
  const int64_t batch = job.global_batch;
  std::vector<std::string> found;
  for (const int64_t sign : {int64_t{-1}, int64_t{1}}) {
    for (int64_t away = 1; away <= job.devices; ++away) {
      job.global_batch = batch + sign * away;
      if (job.global_batch < 1) break;
      if (!has_strategy(job)) continue;
      found.push_back(format_count(job.global_batch));
      break;
    }
  }
  if (found.empty()) return "";
  return found.size() == 1 ? "; " + found[0] + " would do"
                           : "; " + found[0] + " or " + found[1] + " would do";
}

std::string listed(const SearchKey& key, const std::vector<int64_t>& values) {
  std::string text;
  for (size_t i = 0; i < values.size() && i < kMostValues; ++i) {
    text += (i == 0 ? "" : ", ") + key.text_of(values[i]);
  }
  return text + (values.size() > kMostValues ? ", …" : "");
}

std::string conflict_text(const SearchJob& job) {
  const Constraints conflict = smallest_conflict(job);
  std::string names;
  for (size_t i = 0; i < conflict.size(); ++i) {
    const char* between = i == 0                     ? ""
                          : i + 1 == conflict.size() ? " and "
                                                     : ", ";
    names += between + conflict.text(i);
  }
  SearchJob without = job;
  without.constraints = conflict.without(conflict.size() - 1);
  const std::string last = conflict.text(conflict.size() - 1);
  const SearchKey& key = find_search_key(last.substr(0, last.find('=')));
  const auto values = values_of(without, key);
  std::string text =
      conflict.size() == 1
          ? "no strategy of " + job.model.name + " on " +
                format_count(job.devices) + " devices with batch " +
                format_count(job.global_batch) + " has " + names
          : names + " contradict each other for " + job.model.name + " on " +
                format_count(job.devices) + " devices with batch " +
                format_count(job.global_batch);
  if (!values.empty()) {
    text += "; " + key.name +
            (conflict.size() == 1 ? " may be " : " may be, with the others, ") +
            listed(key, values);
  }
  return text;
}

// What check_strategy says of the simplest layout: all devices data parallel.
std::string complaint(const SearchJob& job) {
  Strategy plain;
  plain.layout.dp_replicate = job.devices;
  plain.global_batch = job.global_batch;
  plain.seq_len = job.seq_len;
  plain.precision = job.precision;
  plain.stack = job.stack;
  return check_strategy(job.model, plain, job.cluster);
}

}  // namespace

std::string explain_impossible(const SearchJob& job) {
  SearchJob free = job;
  free.constraints = {};
  if (has_strategy(free)) return "--fix: " + conflict_text(job);
  const std::string nearest = nearest_batches(free);
  if (!nearest.empty()) {
    return "--batch " + std::to_string(job.global_batch) + ": no layout of " +
           format_count(job.devices) + " devices divides it for " +
           job.model.name + nearest;
  }
  const std::string why = complaint(free);
  return job.model.name + " has no strategy on " + format_count(job.devices) +
         " devices of " + job.cluster.name + (why.empty() ? "" : ": " + why);
}

std::string why_none(const SearchJob& job) {
  SearchJob free = job;
  free.constraints = {};
  if (!has_strategy(free)) {
    return "no layout divides the batch of " + format_count(job.global_batch);
  }
  const Constraints conflict = smallest_conflict(job);
  // A degree that every rank has samples of its own for.
  for (size_t i = 0; i < conflict.size(); ++i) {
    const std::string text = conflict.text(i);
    for (const char* key : {"dp=", "fsdp=", "data="}) {
      if (text.rfind(key, 0) != 0) continue;
      const int64_t degree = std::stoll(text.substr(text.find('=') + 1));
      if (job.global_batch % degree == 0) continue;
      return "a batch of " + format_count(job.global_batch) +
             " samples does not divide by " + format_count(degree) + " ranks";
    }
  }
  SearchJob without = job;
  without.constraints = conflict.without(conflict.size() - 1);
  const std::string last = conflict.text(conflict.size() - 1);
  const SearchKey& key = find_search_key(last.substr(0, last.find('=')));
  const auto values = values_of(without, key);
  return "is not possible here" +
         (values.empty() ? ""
                         : "; " + key.name + " may be " + listed(key, values));
}

std::vector<int64_t> values_of(const SearchJob& job, const SearchKey& key) {
  std::set<int64_t> values;
  if (key.name == "recompute") return {0, 1, 2};
  if (key.name == "offload" || key.name == "activations") {
    return rules_of_stack(job.stack).offload ? std::vector<int64_t>{0, 1}
                                             : std::vector<int64_t>{0};
  }
  const bool of_variants = key.name == "schedule" || key.name == "gather" ||
                           key.name == "stage" || key.name == "stages_per_rank";
  for (const auto& group : list_groups(job)) {
    if (key.name == "order") {
      for (const int order : orders_of(job, group.layout)) values.insert(order);
    } else if (!of_variants) {
      values.insert(key.value(group));
      continue;
    }
    for (const auto& variant : list_variants(job, group)) {
      values.insert(key.value(variant));
    }
  }
  return {values.begin(), values.end()};
}

}  // namespace echelon
