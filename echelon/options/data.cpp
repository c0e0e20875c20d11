#include "echelon/options/data.h"

#include "echelon/options/bind.h"

namespace echelon {

namespace {

constexpr config::Names<DataKind> kDataKindNames = {
    {"digits", DataKind::digits},   {"dummy", DataKind::dummy},
    {"tensors", DataKind::tensors}, {"images", DataKind::images},
    {"text", DataKind::text},       {"own", DataKind::own}};

constexpr config::Names<ChatTemplate> kChatTemplateNames = {
    {"chatml", ChatTemplate::chatml}, {"llama3", ChatTemplate::llama3}};

void bind_text(config::Section& section, DataOptions& options) {
  section.field(
      "sources", options.sources,
      "text: files, or patterns such as \"doc/*.md\"; text, .jsonl, .parquet, "
      "tokens in a .bin, or a .bin with its .idx");
  section.field(
      "weights", options.weights,
      "text: fraction of the samples from each source; empty: by size",
      {.above = 0});
  section.field(
      "format", options.format, "text: what the sources are",
      {{"by_suffix", TextFormat::by_suffix},
       {"text", TextFormat::text},
       {"tokens", TextFormat::tokens},
       {"indexed", TextFormat::indexed},
       {"jsonl", TextFormat::jsonl}});
  section.field(
      "tokenizer", options.tokenizer,
      "text: bytes, a tokenizer.json, or a SentencePiece .model; empty: bytes "
      "for text, none for tokens");
  section.field(
      "vocab_size", options.vocab_size,
      "text: how many tokens there are; 0: the tokenizer's",
      {.at_least = 0, .at_most = 2147483647});
  section.field(
      "token_bytes", options.token_bytes,
      "text: bytes of a token in a .bin without .idx: 2 or 4; 0: 2",
      {.at_least = 0, .at_most = 4});
  section.field(
      "sequence", options.sequence, "text: tokens of a sample",
      {.at_least = 1, .at_most = 1 << 24});
  section.field(
      "documents", options.documents,
      "text: respected: tokens attend only within their document",
      {{"packed", Documents::packed}, {"respected", Documents::respected}});
  section.field(
      "document_separator", options.document_separator,
      "text: what separates documents in text files; empty: a file is one");
  section.field(
      "text_field", options.text_field,
      "text: the field of a .jsonl's lines, or the column of a .parquet, that "
      "is the document, where they have no messages");
  section.field(
      "chat_template", options.chat_template,
      "text: how the messages of a .jsonl's lines become a text; the loss is "
      "on the assistant's tokens alone",
      kChatTemplateNames);
  section.field(
      "end_of_text_id", options.end_of_text_id,
      "text: the token that ends a document; -1: the tokenizer's own",
      {.at_least = -1});
}

}  // namespace

std::string to_string(ChatTemplate chat) {
  return config::name_of(chat, kChatTemplateNames);
}

std::string to_string(DataKind kind) {
  return config::name_of(kind, kDataKindNames);
}

void bind(config::Section& section, DataOptions& options) {
  section.field(
      "name", options.name,
      "digits: 1,797 handwritten digits; dummy: random images; tensors: a "
      "safetensors file or a CSV table; images: a folder of class folders, or "
      "tar files; text: text files, or files of tokens; own: what a library "
      "or a program brings",
      kDataKindNames);
  section.field(
      "path", options.path,
      "tensors: a .safetensors file with inputs and targets, or a .csv whose "
      "column target has the classes; images: a folder of class folders, or a "
      "pattern of tar files such as \"shards/*.tar\"; text: a single source");
  section.field(
      "shuffle", options.shuffle,
      "a new order of samples each epoch, from train.seed");
  section.field(
      "holdout", options.holdout,
      "fraction of the samples that is held out for evaluation; 0: none",
      {.at_least = 0, .below = 1});
  section.field(
      "holdout_path", options.holdout_path,
      "a file or folder of held-out samples instead");
  section.field(
      "drop_last", options.drop_last,
      "training: drop the last batch of an epoch if it is not full");
  section.field(
      "workers", options.workers,
      "threads per rank that prepare batches; data in memory uses none if a "
      "batch takes less than 50 us",
      {.at_least = 1, .at_most = 256});
  section.field(
      "prefetch", options.prefetch, "batches prepared ahead",
      {.at_least = 1, .at_most = 1024});
  section.field(
      "samples", options.samples, "dummy: how many images", {.at_least = 1});
  section.field("shape", options.shape, "dummy: channels, height, width")
      .length(3, 3)
      .within({.at_least = 1, .at_most = 65536});
  section.field(
      "classes", options.classes, "dummy: how many classes",
      {.at_least = 1, .at_most = 1 << 24});
  section.field(
      "image_size", options.image_size,
      "images: height and width after the crop",
      {.at_least = 1, .at_most = 16384});
  section.field(
      "crop", options.crop,
      "images: the crop in training; evaluation uses center",
      {{"center", Crop::center}, {"random_resized", Crop::random_resized}});
  section.field(
      "flip", options.flip, "images: random horizontal flips in training");
  section
      .field(
          "mean", options.mean,
          "images: subtracted per channel, from values in [0, 1]")
      .length(3, 3);
  section.field("std", options.std, "images: divisor per channel")
      .length(3, 3)
      .within({.above = 0});
  section.field(
      "bad_image", options.bad_image,
      "images: whether a broken image is an error, or is skipped and counted",
      {{"error", BadImage::error}, {"skip", BadImage::skip}});
  section.field(
      "max_image_pixels", options.max_image_pixels,
      "images: one with more pixels is refused before it is decoded",
      {.at_least = 1});
  bind_text(section, options);
}

int64_t
batches_per_epoch(int64_t samples, int64_t global_batch, bool drop_last) {
  const bool rest = samples % global_batch != 0 && !drop_last;
  return samples / global_batch + (rest ? 1 : 0);
}

}  // namespace echelon
