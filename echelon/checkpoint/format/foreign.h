// Checkpoints of other programs that are not read, recognised by their files.
// Free of LibTorch.
#pragma once

#include <filesystem>
#include <string>

namespace echelon {

/// What lies at `path` (a folder or a file), why it is not read, and which
/// commands turn it into something that is: sentences for the end of a message.
/// Empty when it is none of these:
///
///   Megatron-LM's    metadata.json that names a sharded_backend, or
///                    latest_checkpointed_iteration.txt, or a folder mp_rank_…
///   PyTorch's DCP    .metadata, *.distcp
///   pickles          *.pt, *.pth, *.bin, *.ckpt
///
/// They keep names, shapes and places of tensors (Megatron-LM also the model's
/// numbers) in pickles, which are programs: reading one runs what is in it.
std::string foreign_checkpoint(const std::filesystem::path& path);

}  // namespace echelon
