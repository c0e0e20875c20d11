// The NCCL backend; see accelerator.h for the library that holds it.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

#include "echelon/comm/nccl/accelerator.h"

namespace echelon {

/// NCCL between `size` ranks that share `store`, for tensors on `device`. Every
/// rank calls this, each with a device of its own: NCCL refuses two ranks on
/// one GPU. Throws ConfigError when the library cannot be loaded or the device
/// does not exist. The ranks connect at their first collective. A call takes at
/// most `most_blocks` blocks of threads, each of which occupies a
/// multiprocessor; 0: as many as NCCL chooses.
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout, c10::Device device, int most_blocks = 0);

/// Has NCCL listen on loopback alone, unless NCCL_SOCKET_IFNAME is set. Call it
/// when all ranks are on this host, before the first backend is made and
/// threads are started.
void keep_nccl_on_this_host();

}  // namespace echelon
