// checksum() of bytes that come piece by piece. Not for others than the writers
// and readers of this folder.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace echelon {

class ChecksumStream {
 public:
  ChecksumStream();
  ~ChecksumStream();
  ChecksumStream(const ChecksumStream&) = delete;
  ChecksumStream& operator=(const ChecksumStream&) = delete;

  void update(const void* bytes, size_t size);
  /// Of all since the last one; begins anew.
  std::string digest();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace echelon
