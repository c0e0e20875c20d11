// How the matrices of a model are cut over a tensor-parallel group, made ready
// to be drawn: Y = X A with A = [A1 A2], or X = [X1 X2] and A = [A1; A2].
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/layout/shard.h"

namespace echelon {

struct CutParameter {
  std::string name;          // within its layer: "attn.c_attn.weight"
  std::vector<Shard> parts;  // by rank of the group; all of one shape
  bool tied = false;         // the memory is an earlier layer's
};

struct CutLayer {
  std::string name;  // "transformer.h.0"
  /// In the order of the model, the uncut ones too. A tied matrix is in each of
  /// its layers.
  std::vector<CutParameter> parameters;
};

/// A whole model. `ranks` 1 or no layer: there is nothing to draw.
struct TensorCut {
  int64_t ranks = 1;
  bool cuts_tokens = false;  // between the layers (sequence parallel)
  int64_t tokens = 0;        // of one microbatch, on all ranks; 0: not known
  std::vector<CutLayer> layers;  // in the order of computation
};

enum class MatrixCut {
  columns,     // by outputs: each rank computes some of Y's columns
  rows,        // by inputs: each rank has some of X's columns; results are sums
  vocabulary,  // a table of words; each rank looks up those it has
};

struct CutMatrix {
  std::string name;  // within its layer: "attn.c_attn"
  MatrixCut cut = MatrixCut::columns;
  int64_t inputs = 0;           // rows of A
  int64_t outputs = 0;          // columns of A
  std::vector<int64_t> kernel;  // of a convolution: height, width
  /// Along the side that is cut, by rank.
  std::vector<std::vector<IndexRange>> pieces;

  int64_t cut_size() const {
    return cut == MatrixCut::columns ? outputs : inputs;
  }
};

/// From where a tensor enters to where it leaves: matrices cut by columns, all
/// of one input, then one cut by rows. Either may be missing.
struct CutRegion {
  std::string name;  // what the names begin with: "attn"
  std::vector<CutMatrix> columns;
  std::vector<CutMatrix> rows;  // or a table of words
};

/// One drawing: equal layers, which differ in their names alone.
struct CutBlock {
  std::vector<std::string> layers;
  std::vector<CutRegion> regions;
  std::vector<std::string>
      cut_vectors;                 // "attn.c_attn.bias", in each rank's part
  std::vector<std::string> whole;  // on every rank
};

/// In the order of their first layers. Layers without a cut parameter have no
/// regions.
///
/// How a matrix is cut follows from its parameters. The sides of a weight may
/// be [out, in] or [in, out]: a bias that is cut belongs to cut outputs, a
/// whole one to cut inputs. Without a bias, and for convolutions, weights are
/// [out, in, …]; a table of words [words, features] is known by its name.
std::vector<CutBlock> cut_blocks(const TensorCut& cut);

/// By rank: parameters that it holds over those of the whole model.
std::vector<double> held_shares(const TensorCut& cut);

}  // namespace echelon
