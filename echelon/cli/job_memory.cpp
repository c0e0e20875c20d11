#include "echelon/cli/job_memory.h"

#include <chrono>

#include "echelon/cli/programs.h"
#include "echelon/cluster/host.h"
#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::cli {
namespace {

double bytes_of(const Job& job, int64_t numbers) {
  return (job.model.dtype == ModelDtype::float64 ? 8.0 : 4.0) *
         static_cast<double>(numbers);
}

// Whether training may take a quarter of the host's memory. A plan costs a
// start of echelon-train, which small models need not wait for.
bool may_not_fit(const Job& job, const JobFacts& facts) {
  if (job.memory.limit_bytes > 0) return true;
  return bytes_of_training(job, facts) *
             static_cast<double>(job.layout.dp_replicate) >
         static_cast<double>(host_bytes()) / 4;
}

}  // namespace

int64_t host_bytes() {
  const cluster::HostMemory memory = cluster::host_memory();
  const bool limited =
      memory.limit_bytes > 0 &&
      (memory.total_bytes <= 0 || memory.limit_bytes < memory.total_bytes);
  return static_cast<int64_t>(
      limited ? memory.limit_bytes : memory.total_bytes);
}

double bytes_of_training(const Job& job, const JobFacts& facts) {
  return bytes_of(job, facts.num_parameters + 3 * facts.num_trained);
}

double bytes_of_state(const Job& job, const JobFacts& facts) {
  return bytes_of(job, facts.num_saved + 2 * facts.num_trained);
}

// There are two copies of the state, and the one that is being made; of several
// hosts, each also holds the two of another one.
double bytes_of_copies(const Job& job, const JobFacts& facts, int num_hosts) {
  return (num_hosts == 1 ? 3 : 5) * bytes_of_state(job, facts);
}

std::string memory_excess(const Job& job, const JobFacts& facts) {
  if (!may_not_fit(job, facts)) return "";
  const ScratchConfig config(job);
  const Captured plan = capture(
      {find_echelon_train(), "plan", config.path(), "--fits", "--host-bytes",
       std::to_string(host_bytes())},
      std::chrono::minutes(10));
  if (plan.exit_code != static_cast<int>(ExitCode::configuration)) return "";
  std::string text = plan.err;
  // A library of [model] library may have printed something before it.
  const std::string mark = "error: ";
  const size_t error = ("\n" + text).find("\n" + mark);
  if (error != std::string::npos) text.erase(0, error + mark.size());
  while (!text.empty() && text.back() == '\n') text.pop_back();
  // The host's memory has a place of its own.
  if (text.starts_with("rank ")) {
    text = job.document.where("memory.limit_bytes") + ": " + text;
  }
  return text;
}

bool may_copy(const Job& job, const JobFacts& facts, int num_hosts) {
  return job.elastic.memory != MemoryCopies::off &&
         bytes_of_copies(job, facts, num_hosts) <=
             static_cast<double>(host_bytes()) / 4;
}

std::string
describe_copies(const Job& job, const JobFacts& facts, int num_hosts) {
  if (job.elastic.memory == MemoryCopies::off) return "";
  const bool fits = may_copy(job, facts, num_hosts);
  return format(
      "\nCopies of the state for restarts take {} of a host's memory{}.\n",
      format_bytes(bytes_of_copies(job, facts, num_hosts)),
      fits ? " ([elastic] memory)"
           : format(
                 ": more than a quarter of the {} here, so none are made",
                 format_bytes(static_cast<double>(host_bytes()))));
}

}  // namespace echelon::cli
