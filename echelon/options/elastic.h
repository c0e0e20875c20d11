// Settings of jobs that outlive faults.
#pragma once

#include <cstdint>
#include <string>

namespace echelon {

/// Whether copies of training's state are kept in memory that outlives the
/// ranks. automatic: when the job may be restarted and the host's memory
/// suffices.
enum class MemoryCopies { automatic, off };

/// Its name in a configuration.
std::string to_string(MemoryCopies copies);

struct ElasticOptions {
  MemoryCopies memory = MemoryCopies::automatic;
  /// Steps between two copies; 0: so many that copies cost about 1 % of the
  /// time.
  int64_t memory_steps = 0;

  bool operator==(const ElasticOptions&) const = default;
};

}  // namespace echelon
