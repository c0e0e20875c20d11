// Loading a library runs its constructors, so its tag is read from the file
// first, as the ELF format stores it: the header, the table of sections, the
// section by its name. Numbers of the file are not trusted.
#include "echelon/train/plugin.h"

#include <dlfcn.h>
#include <elf.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <vector>

#include "echelon/error.h"
#include "echelon/text/build_info.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

static_assert(
    std::string_view(build_info::kVersion) == "0.1.0",
    "PluginTag::echelon has the version too");

// [offset, offset + size) of a file; none where it ends before.
std::optional<std::string>
bytes_at(std::ifstream& file, uint64_t offset, uint64_t size) {
  constexpr uint64_t kMost = 1 << 24;  // of a table of sections or names
  if (size > kMost || offset > (uint64_t{1} << 62)) return std::nullopt;
  std::string bytes(size, '\0');
  file.clear();
  file.seekg(static_cast<std::streamoff>(offset));
  file.read(bytes.data(), static_cast<std::streamsize>(size));
  if (file.gcount() != static_cast<std::streamsize>(size)) return std::nullopt;
  return bytes;
}

template <class T>
T value_at(const std::string& bytes, size_t offset = 0) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

// The content of a section of a 64-bit ELF file.
std::optional<std::string>
section_of(std::ifstream& file, const std::string& wanted) {
  const auto head = bytes_at(file, 0, sizeof(Elf64_Ehdr));
  if (!head) return std::nullopt;
  const auto header = value_at<Elf64_Ehdr>(*head);
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
      header.e_ident[EI_CLASS] != ELFCLASS64 ||
      header.e_shentsize != sizeof(Elf64_Shdr) ||
      header.e_shstrndx >= header.e_shnum) {
    return std::nullopt;
  }
  const auto table =
      bytes_at(file, header.e_shoff, header.e_shnum * sizeof(Elf64_Shdr));
  if (!table) return std::nullopt;
  const auto section = [&](size_t i) {
    return value_at<Elf64_Shdr>(*table, i * sizeof(Elf64_Shdr));
  };
  const auto names_of = section(header.e_shstrndx);
  auto names = bytes_at(file, names_of.sh_offset, names_of.sh_size);
  if (!names) return std::nullopt;
  for (size_t i = 0; i < header.e_shnum; ++i) {
    const auto one = section(i);
    if (one.sh_name >= names->size()) continue;
    if (wanted != names->c_str() + one.sh_name) continue;
    return bytes_at(file, one.sh_offset, one.sh_size);
  }
  return std::nullopt;
}

std::string version(const uint32_t (&numbers)[3]) {
  return format("{}.{}.{}", numbers[0], numbers[1], numbers[2]);
}

std::string place(const std::string& path) {
  return format("[model] library=\"{}\"", path);
}

void check_named(
    const Job& job, bool brings, bool is_own, const std::string& key,
    const std::string& noun) {
  if (brings == is_own) return;
  throw ConfigError(
      place(job.model.library) +
      (brings ? format(
                    " brings a {} of its own; set {} name = \"own\" to use "
                    "it, or let its function leave it out",
                    noun, key)
              : format(
                    " brings no {} of its own, and {} name is \"own\"; name "
                    "one of Echelon's, or let its function return one",
                    noun, key)));
}

}  // namespace

namespace detail {

PluginTag read_plugin_tag(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file || !std::filesystem::is_regular_file(path)) {
    throw ConfigError(place(path) + ": there is no such file");
  }
  const auto bytes = section_of(file, kPluginSection);
  PluginTag tag;
  if (bytes && bytes->size() >= offsetof(PluginTag, sizes)) {
    std::memcpy(
        static_cast<void*>(&tag), bytes->data(),
        std::min(bytes->size(), sizeof tag));
  }
  if (!bytes || bytes->size() < offsetof(PluginTag, sizes) ||
      std::memcmp(tag.mark, PluginTag().mark, sizeof tag.mark) != 0) {
    throw ConfigError(
        place(path) +
        ": is no library for Echelon; one ends with ECHELON_PLUGIN(function) "
        "(echelon/train/plugin.h), and is built as `echelon new` shows");
  }
  return tag;
}

std::string difference(const PluginTag& theirs, const PluginTag& own) {
  if (version(theirs.echelon) != version(own.echelon) ||
      theirs.form != own.form) {
    return format(
        "Echelon {}, and this is Echelon {}", version(theirs.echelon),
        version(own.echelon));
  }
  if (version(theirs.torch) != version(own.torch)) {
    return format(
        "LibTorch {}, and this program with LibTorch {}", version(theirs.torch),
        version(own.torch));
  }
  if (theirs.abi[0] != own.abi[0] || theirs.abi[1] != own.abi[1]) {
    return format(
        "a compiler of ABI {}.{}, and this program with one of ABI {}.{}",
        theirs.abi[0], theirs.abi[1], own.abi[0], own.abi[1]);
  }
  if (theirs != own) {
    return format(
        "another build of Echelon {}, whose structures differ",
        version(own.echelon));
  }
  return {};
}

}  // namespace detail

OwnParts load_plugin(const Job& job) {
  const std::string& path = job.model.library;
  if (path.empty()) return {};
  const std::string differs =
      detail::difference(detail::read_plugin_tag(path), PluginTag());
  if (!differs.empty()) {
    throw ConfigError(format(
        "{} was built with {}; build it again with the package of this "
        "program. Nothing in it was run",
        place(path), differs));
  }
  // Ranks that are threads share it. It stays until the process ends: what it
  // returned has code there.
  void* library =
      ::dlopen(std::filesystem::absolute(path).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw ConfigError(format(
        "{} cannot be loaded: {}. Link it with Echelon::plugin, not with "
        "Echelon::echelon",
        place(path), ::dlerror()));
  }
  using Parts = void(const Job&, OwnParts&);
  auto* parts =
      reinterpret_cast<Parts*>(::dlsym(library, "echelon_plugin_parts"));
  if (parts == nullptr) {
    throw ConfigError(place(path) + " has no function echelon_plugin_parts");
  }
  OwnParts own;
  try {
    parts(job, own);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw ConfigError(format("{}: {}", place(path), error.what()));
  }
  check_named(
      job, own.layers.factory() != nullptr, job.model.name == kOwnModel,
      "[model]", "model");
  check_named(
      job, own.dataset != nullptr, job.data.name == DataKind::own, "[data]",
      "data set");
  return own;
}

}  // namespace echelon
