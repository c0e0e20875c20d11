// The `gloo` backend: CPU tensors over any network, LibTorch's own.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

namespace echelon {

/// Connects `size` ranks with each other; every member calls. `address` is the
/// local address that the others can reach ("127.0.0.1" on one host). Throws
/// what LibTorch throws when a peer does not come within the timeout.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    const std::string& address, std::chrono::milliseconds timeout);

}  // namespace echelon
