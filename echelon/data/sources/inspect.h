// Facts about a data set, found without LibTorch and without decoding a sample,
// so that the command line can check a configuration before any rank starts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/options/data.h"

namespace echelon {

struct DataFacts {
  int64_t num_samples = 0;  // of data.path (or random), with held-out ones
  int64_t num_train = 0;
  int64_t num_holdout = 0;
  std::vector<int64_t> sample_shape;  // of one input: [1, 8, 8]
  int64_t classes = 0;                // targets are 0 .. classes-1
  std::string describe;               // "1797 digits, 10 classes, 1x8x8"
};

/// Checks `options` and the files that they name: lists folders, reads headers,
/// reads the targets of a tensors file for the number of classes, and tokenises
/// plain text (text.h). A sample of text is [sequence] tokens, and
/// classes is the size of the vocabulary. Throws ConfigError for a wrong
/// setting and DataError for a file or folder that is missing, empty or
/// malformed.
DataFacts inspect_data(const DataOptions& options);

}  // namespace echelon
