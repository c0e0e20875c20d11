#include "echelon/bench/bench_collectives.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/types.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>

#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::bench {
namespace {

using torch::Tensor;

constexpr int64_t kCallRounds = 5;

/// Elements of a tensor of about `bytes` that so many ranks share evenly.
int64_t elements_of(int64_t bytes, int64_t ranks) {
  return std::max<int64_t>(ranks, bytes / 4 / ranks * ranks);
}

/// One call of `operation` on tensors that stay the same.
std::function<void()> make_call(
    const std::string& operation, const Group& group, int64_t bytes,
    torch::Device device) {
  const int64_t size = group.size();
  const int64_t numel = elements_of(bytes, size);
  const auto options = torch::TensorOptions(torch::kFloat32).device(device);
  // Zeros stay zeros when summed; the first write allocates the memory.
  const Tensor whole = torch::ones({numel}, options).zero_();
  const Tensor slice = torch::ones({numel / size}, options).zero_();
  if (operation == "all_reduce") return [=] { group.all_reduce(whole); };
  if (operation == "all_gather") {
    return [=] { group.all_gather(whole, slice); };
  }
  if (operation == "reduce_scatter") {
    return [=] { group.reduce_scatter(slice, whole); };
  }
  if (operation == "broadcast") return [=] { group.broadcast(whole, 0); };
  if (operation == "all_to_all") {
    const Tensor other = torch::ones({numel}, options).zero_();
    return [=] { group.all_to_all(other, whole); };
  }
  if (operation == "send_recv") {
    const int next = (group.rank() + 1) % group.size();
    const int previous = (group.rank() + group.size() - 1) % group.size();
    const Tensor other = torch::ones({numel}, options).zero_();
    return [=] {
      group.batch_send_recv(
          {{true, whole, next, 0}, {false, other, previous, 0}});
    };
  }
  throw ConfigError(format(
      "bench: unknown operation \"{}\"; there are all_reduce, all_gather, "
      "reduce_scatter, broadcast, all_to_all and send_recv",
      operation));
}

// A device's calls are only queued when they return: it is waited for at the
// end of all of them.
double microseconds_of(
    const std::function<void()>& call, int64_t calls, torch::Device device) {
  const auto finish = [&] {
    if (device.is_cpu()) return;
    const c10::impl::VirtualGuardImpl guard(device.type());
    guard.synchronizeDevice(guard.getDevice().index());
  };
  finish();
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < calls; ++i) call();
  finish();
  return std::chrono::duration<double, std::micro>(
             std::chrono::steady_clock::now() - begin)
             .count() /
         static_cast<double>(calls);
}

}  // namespace

std::vector<BenchRow>
bench_collectives(World& world, const BenchOptions& options) {
  std::vector<int> all;
  for (int rank = 0; rank < world.size(); ++rank) all.push_back(rank);
  std::vector<Group> groups;
  for (BackendKind kind : options.backends) {
    groups.push_back(world.new_group(to_string(kind), all, kind));
  }
  std::vector<BenchRow> rows;
  for (const auto& operation : options.operations) {
    for (int64_t bytes : options.bytes) {
      std::vector<std::function<void()>> calls;
      std::vector<std::vector<double>> times(groups.size());
      for (const auto& group : groups) {
        calls.push_back(make_call(operation, group, bytes, world.device()));
      }
      // Enough calls to move some 200 MiB a backend in five rounds.
      const int64_t per_round =
          std::clamp<int64_t>((40 << 20) / std::max<int64_t>(bytes, 1), 2, 400);
      for (int64_t round = 0; round < kCallRounds; ++round) {
        for (size_t i = 0; i < groups.size(); ++i) {
          groups[i].barrier();
          calls[i]();
          const int64_t at_once = world.device().is_cpu() ? 1 : per_round;
          for (int64_t call = 0; call < per_round; call += at_once) {
            times[i].push_back(
                microseconds_of(calls[i], at_once, world.device()));
          }
        }
      }
      for (size_t i = 0; i < groups.size(); ++i) {
        std::ranges::sort(times[i]);
        rows.push_back(
            {.backend = to_string(options.backends[i]),
             .operation = operation,
             .ranks = world.size(),
             .bytes = bytes,
             .min_microseconds = times[i].front(),
             .median_microseconds = times[i][times[i].size() / 2],
             .calls = kCallRounds * per_round});
      }
    }
  }
  return rows;
}

Bandwidth bandwidth_of(const BenchRow& row) {
  if (row.median_microseconds <= 0) return {};
  const double bytes =
      4 * static_cast<double>(elements_of(row.bytes, row.ranks));
  const double algorithm = bytes / row.median_microseconds / 1e3;
  const double others = static_cast<double>(row.ranks - 1) / row.ranks;
  double factor = 1;
  if (row.operation == "all_reduce") {
    factor = 2 * others;
  } else if (
      row.operation == "all_gather" || row.operation == "reduce_scatter" ||
      row.operation == "all_to_all") {
    factor = others;
  }
  return {.algorithm = algorithm, .bus = factor * algorithm};
}

std::string to_text(const std::vector<BenchRow>& rows) {
  std::string text =
      "operation        backend  ranks       size   median us      min us  "
      "algbw GB/s  busbw GB/s\n";
  for (const auto& row : rows) {
    const Bandwidth bandwidth = bandwidth_of(row);
    text += format(
        "{:<16} {:<8} {:5} {:>10} {:11.1f} {:11.1f} {:11.3f} {:11.3f}\n",
        row.operation, row.backend, row.ranks, format_bytes(row.bytes),
        row.median_microseconds, row.min_microseconds, bandwidth.algorithm,
        bandwidth.bus);
  }
  return text;
}

std::string to_json(const std::vector<BenchRow>& rows) {
  auto json = nlohmann::ordered_json::array();
  for (const auto& row : rows) {
    const Bandwidth bandwidth = bandwidth_of(row);
    json.push_back(
        {{"backend", row.backend},
         {"operation", row.operation},
         {"ranks", row.ranks},
         {"bytes", row.bytes},
         {"microseconds", row.median_microseconds},
         {"min_microseconds", row.min_microseconds},
         {"algbw_gb_per_second", bandwidth.algorithm},
         {"busbw_gb_per_second", bandwidth.bus},
         {"calls", row.calls}});
  }
  return json.dump();
}

}  // namespace echelon::bench
