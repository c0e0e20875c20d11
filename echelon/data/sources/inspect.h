// What a data set holds, found without LibTorch and without decoding a sample:
// the command line checks a configuration with it before any rank starts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/options/data.h"

namespace echelon {

struct DataFacts {
  int64_t num_samples = 0;  // of data.path (or made up), held-out ones included
  int64_t num_train = 0;
  int64_t num_holdout = 0;
  std::vector<int64_t> sample_shape;  // of one input: [1, 8, 8]
  int64_t classes = 0;                // targets are 0 .. classes-1
  std::string describe;               // "1797 digits, 10 classes, 1x8x8"
};

/// Checks `options` and what they point to. Folders are listed and headers are
/// read; of a tensors file the targets are read too, for the number of classes.
/// Plain text is tokenised (token_cache.h); a sample is [sequence] tokens, and
/// classes is the vocabulary.
/// Throws ConfigError for a setting that is wrong by itself and DataError for a
/// file or folder that is missing, empty or malformed.
DataFacts inspect_data(const DataOptions& options);

}  // namespace echelon
