// Settings of the data.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace echelon {

/// `own`: the data set of a program (train/trainer.h) or a library
/// (train/plugin.h).
enum class DataKind { digits, dummy, tensors, images, text, own };
enum class BadImage { error, skip };         // what a broken image causes
enum class Crop { center, random_resized };  // how an image gets its size
enum class Documents { packed, respected };  // whether attention stops at them
enum class TextFormat { by_suffix, text, tokens, indexed, jsonl };
/// How the messages of a conversation become one text (data/sources/chat.h).
enum class ChatTemplate { chatml, llama3 };

/// Its name in a configuration.
std::string to_string(DataKind kind);
std::string to_string(ChatTemplate chat);

/// A batch that is prepared faster than this is prepared without threads:
/// waking one, and sharing the cores with the model, would take as long.
inline constexpr double kQuickBatchSeconds = 50e-6;

struct DataOptions {
  DataKind name = DataKind::digits;
  std::string path;     // tensors: a .safetensors file; images: a folder;
                        // text: a single source
  bool shuffle = true;  // a new order each epoch, from train.seed
  /// The share of samples that is held out to measure accuracy: the last ones
  /// of the seeded order. 0 holds nothing out.
  double holdout = 0.2;
  std::string holdout_path;  // a separate file or folder instead
  bool drop_last = false;    // omit an epoch's last batch if it is not full
  int64_t workers = 2;       // threads per rank that prepare batches
  int64_t prefetch = 2;      // batches prepared ahead

  // dummy
  int64_t samples = 10000;
  std::vector<int64_t> shape = {3, 224, 224};  // channels, height, width
  int64_t classes = 10;

  // images
  int64_t image_size = 224;  // height and width after the crop
  Crop crop = Crop::center;  // in training; held-out images use center
  bool flip = false;         // left-right, half of the time, in training
  std::vector<double> mean = {0.485, 0.456, 0.406};
  std::vector<double> std = {0.229, 0.224, 0.225};
  BadImage bad_image = BadImage::error;
  int64_t max_image_pixels = 178956970;  // more is refused before decoding

  // text (data/sources/text.h)
  /// Files, or patterns as in "doc/*.md": text, plain tokens in a .bin, or a
  /// .bin with its .idx.
  std::vector<std::string> sources;
  std::vector<double> weights;  // one per source; empty: by their sizes
  TextFormat format = TextFormat::by_suffix;  // of all sources
  std::string tokenizer;    // bytes, a tokenizer.json, a .model; "": bytes
                            // for text, none for tokens
  int64_t vocab_size = 0;   // 0: the tokenizer's
  int64_t token_bytes = 0;  // of plain .bin files: 2 or 4; 0: 2
  int64_t sequence = 256;   // tokens of a sample
  Documents documents = Documents::packed;
  std::string document_separator;   // within text files; "": a file is one
  std::string text_field = "text";  // of a .jsonl's lines
  ChatTemplate chat_template = ChatTemplate::chatml;  // for their messages
  int64_t end_of_text_id = -1;  // ends a document; -1: the tokenizer's own
};

/// The batches of one epoch of `samples`; the last one may not be full.
int64_t
batches_per_epoch(int64_t samples, int64_t global_batch, bool drop_last);

}  // namespace echelon
