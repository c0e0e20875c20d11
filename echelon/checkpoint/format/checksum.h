// XXH3-128 checksums as 32 hexadecimal digits: of bytes in memory, and of bytes
// that arrive piece by piece.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

struct XXH3_state_s;

namespace echelon {

std::string checksum(const void* bytes, size_t size);

class ChecksumStream {
 public:
  ChecksumStream();

  void update(const void* bytes, size_t size);
  /// The checksum of all bytes since the last call.
  std::string digest();

 private:
  struct Free {
    void operator()(XXH3_state_s* state) const;
  };
  std::unique_ptr<XXH3_state_s, Free> state_;
};

}  // namespace echelon
