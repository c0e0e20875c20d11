// The shards of a model's matrices over a tensor-parallel group, as
// reports draw them: Y = X A with A = [A1 A2], or X = [X1 X2] and A = [A1; A2].
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/layout/shard.h"

namespace echelon::report {

struct ParameterShards {
  std::string name;          // within its layer: "attn.c_attn.weight"
  std::vector<Shard> parts;  // by rank of the group; all of one shape
  bool tied = false;         // the memory is an earlier layer's
};

struct LayerShards {
  std::string name;  // "transformer.h.0"
  /// All parameters in the order of the model, also the replicated ones. A tied
  /// matrix is in each of its layers.
  std::vector<ParameterShards> parameters;
};

/// A model. With `ranks` 1, or without layers, there is nothing to draw.
struct TensorShards {
  int64_t ranks = 1;
  bool shards_tokens = false;  // between the layers (sequence parallel)
  int64_t tokens = 0;          // of one microbatch, on all ranks; 0: not known
  std::vector<LayerShards> layers;  // in the order of computation
};

enum class ShardedBy {
  columns,     // by outputs: each rank computes some of Y's columns
  rows,        // by inputs: each rank has some of X's columns; results are sums
  vocabulary,  // an embedding; each rank looks up the tokens it holds
};

struct ShardedMatrix {
  std::string name;  // within its layer: "attn.c_attn"
  ShardedBy sharded_by = ShardedBy::columns;
  int64_t inputs = 0;           // rows of A
  int64_t outputs = 0;          // columns of A
  std::vector<int64_t> kernel;  // of a convolution: height, width
  /// Along the sharded side, by rank.
  std::vector<std::vector<IndexRange>> pieces;

  int64_t sharded_size() const {
    return sharded_by == ShardedBy::columns ? outputs : inputs;
  }
};

/// The stretch from where a tensor enters to where it leaves: matrices sharded
/// by columns, all with one input, then one sharded by rows. Either may be
/// missing.
struct ShardedRegion {
  std::string name;  // what the names begin with: "attn"
  std::vector<ShardedMatrix> columns;
  std::vector<ShardedMatrix> rows;  // or an embedding
};

/// One drawing: equal layers, which differ in their names alone.
struct ShardedBlock {
  std::vector<std::string> layers;
  std::vector<ShardedRegion> regions;
  std::vector<std::string> sharded_vectors;  // "attn.c_attn.bias"
  std::vector<std::string> replicated;       // on every rank
};

/// In the order of their first layers. Layers without a sharded parameter have
/// no regions.
///
/// How a matrix is sharded follows from its parameters. The sides of a weight
/// may be [out, in] or [in, out]: a sharded bias belongs to sharded outputs, a
/// replicated one to sharded inputs. Without a bias, and for convolutions,
/// weights are [out, in, …]; an embedding [vocabulary, features] is known by
/// its name.
std::vector<ShardedBlock> sharded_blocks(const TensorShards& model);

/// The share of the model's parameters that each rank holds.
std::vector<double> held_shares(const TensorShards& model);

}  // namespace echelon::report
