#include "echelon/options/comm.h"

#include "echelon/config/section.h"

namespace echelon {

void bind(config::Section& section, CommOptions& options) {
  section.field(
      "backend", options.backend,
      "what carries the tensors; auto: nccl with a GPU per rank, "
      "local on one host, gloo otherwise",
      {{"auto", BackendKind::automatic},
       {"local", BackendKind::local},
       {"gloo", BackendKind::gloo},
       {"nccl", BackendKind::nccl}});
  section
      .field(
          "timeout", options.timeout,
          "a collective that takes longer fails on every rank in it")
      .at_least(1)
      .at_most(7 * 24 * 3600);
  section
      .field(
          "rendezvous_timeout", options.rendezvous_timeout,
          "how long a rank waits for the others when the job starts")
      .at_least(1)
      .at_most(24 * 3600);
  section.field(
      "share_tensors", options.share_tensors,
      "local between processes: big tensors live in memory that every rank of "
      "the host maps");
  section.field(
      "check_collectives", options.check_collectives,
      "compare operation, shape and dtype across ranks before each "
      "collective; local always does");
}

}  // namespace echelon
