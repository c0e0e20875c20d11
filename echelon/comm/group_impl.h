// The members of a Group; for the files of comm/ alone, since they have c10d's
// types.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <string>
#include <vector>

#include "echelon/comm/group.h"
#include "echelon/options/comm.h"

namespace echelon {

struct Group::Impl {
  int rank = 0;
  std::string axis;
  std::vector<int> ranks = {0};
  BackendKind kind = BackendKind::local;
  torch::Device device = torch::kCPU;
  c10::intrusive_ptr<c10d::Backend> backend;  // null for one rank, or silent
};

struct Work::Impl {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::function<void()> after;  // called once, when all have ended
  bool waited = false;
};

/// A group around a backend (null: a group of one rank).
Group make_group(
    c10::intrusive_ptr<c10d::Backend> backend, const std::string& axis,
    const std::vector<int>& ranks, int rank, BackendKind kind,
    torch::Device device);

}  // namespace echelon
