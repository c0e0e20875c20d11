// A stream of a GPU beside the one that computes, for copies that the
// computation does not wait for. On CPUs there are no streams: copies are done
// at once.
#pragma once

#include <torch/types.h>

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <memory>
#include <optional>

namespace echelon::sharding {

class CopyStream {
 public:
  explicit CopyStream(torch::Device device);

  /// While it lives, operators of this thread go to this stream, behind what
  /// the computing one has so far.
  class Scope {
   public:
    explicit Scope(const CopyStream& stream);

   private:
    std::optional<c10::StreamGuard> guard_;
  };

  /// A place in the stream. Copies share it; the default one has passed.
  class Mark {
   public:
    /// What this thread's stream gets from now on comes after it.
    void wait() const;
    /// Returns when the GPU has passed it.
    void synchronize() const;

   private:
    friend class CopyStream;
    std::shared_ptr<c10::Event> event_;
    torch::Device device_ = torch::kCPU;
  };

  /// Behind all that it was given.
  Mark mark() const;

 private:
  torch::Device device_;
  std::optional<c10::Stream> stream_;
};

}  // namespace echelon::sharding
