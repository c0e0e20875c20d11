#include "echelon/predict/choices.h"

#include <algorithm>

#include "echelon/architecture/language_model.h"
#include "echelon/cluster/local_cluster.h"
#include "echelon/error.h"
#include "echelon/predict/configured.h"

namespace echelon::predict {
namespace {

cluster::Cluster
hosts_like_this(int64_t ranks, int64_t ranks_per_host, bool on_processor) {
  cluster::Cluster hosts =
      cluster::local_cluster(std::min(ranks, ranks_per_host), on_processor)
          .cluster;
  if (ranks <= ranks_per_host) return hosts;
  cluster::NodeGroup& group = hosts.groups.front();
  group.count = (ranks + ranks_per_host - 1) / ranks_per_host;
  if (group.node.network.bytes_per_second > 0) return hosts;
  group.node.network =
      cluster::network_of(cluster::look_at_machine(), ranks_per_host);
  // Unknown: as if the hosts were one.
  if (group.node.network.bytes_per_second == 0) {
    group.node.network = group.node.inside;
  }
  return hosts;
}

// What layers depend on, without a look at the data.
JobFacts facts_of_text(const Job& job) {
  JobFacts facts;
  facts.data.sample_shape = {job.data.sequence};
  facts.classes = std::max<int64_t>(1, job.model.vocab_size);
  return facts;
}

// What `choose` returns for the job on such hosts.
template <class Choose>
auto choice_for(
    const Job& job, int64_t ranks_per_host, bool on_processor,
    const Choose& choose) {
  if (!is_language_model(job.model)) {
    throw ConfigError("the cost of this model is not known");
  }
  const Configured what = configured(job, facts_of_text(job));
  return choose(
      what.model, what.strategy,
      hosts_like_this(
          job.layout.num_ranks(), std::max<int64_t>(1, ranks_per_host),
          on_processor));
}

}  // namespace

cost::ContextWayChoice
choose_context(const Job& job, int64_t ranks_per_host, bool on_processor) {
  cost::ContextWayChoice choice{.options = job.context, .why = ""};
  if (job.layout.cp == 1 || !cost::is_open(job.context)) return choice;
  try {
    choice =
        choice_for(job, ranks_per_host, on_processor, cost::choose_context_way);
  } catch (const Error& error) {
    choice.options = {ContextWay::ring};
    choice.why = "ring: " + std::string(error.what());
  }
  choice.why = "context: " + choice.why;
  return choice;
}

cost::ProductChunksChoice
choose_chunks(const Job& job, int64_t ranks_per_host, bool on_processor) {
  if (job.tensor.overlap_chunks > 0) return {job.tensor.overlap_chunks, ""};
  if (job.layout.tp == 1 || on_processor) return {};
  cost::ProductChunksChoice choice;
  try {
    choice = choice_for(
        job, ranks_per_host, on_processor, cost::choose_product_chunks);
  } catch (const Error& error) {
    choice.why = "1: " + std::string(error.what());
  }
  if (!choice.why.empty()) choice.why = "overlap_chunks: " + choice.why;
  return choice;
}

}  // namespace echelon::predict
