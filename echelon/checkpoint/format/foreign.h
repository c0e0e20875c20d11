// Recognises checkpoints of other programs, which Echelon does not read. Free
// of LibTorch.
#pragma once

#include <filesystem>
#include <string>

namespace echelon {

/// Sentences for the end of a message: what is at `path` (a folder or a file),
/// why it is not read, and which commands convert it into something that is.
/// Empty when it is none of these:
///
///   Megatron-LM's    metadata.json that names a sharded_backend, or
///                    latest_checkpointed_iteration.txt, or a folder mp_rank_…
///   PyTorch's DCP    .metadata, *.distcp
///   pickles          *.pt, *.pth, *.bin, *.ckpt
///
/// They store names, shapes and places of tensors (Megatron-LM also the model's
/// sizes) in pickles, which are programs: reading one runs what is in it.
std::string foreign_checkpoint(const std::filesystem::path& path);

}  // namespace echelon
