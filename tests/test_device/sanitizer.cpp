#include "tests/test_device/sanitizer.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <unordered_map>

#include "echelon/text/format.h"

namespace echelon::test_device {
namespace {

std::string demangled(const char* name) {
  int status = 0;
  char* text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  std::string result = status == 0 ? text : name;
  std::free(text);
  return result;
}

// The function of this project at `address`; empty for others. A lookup is
// slow, and the same calls come again in each step.
const std::string& function_at(void* address) {
  static std::mutex mutex;
  static std::unordered_map<void*, std::string> found;
  const std::lock_guard lock(mutex);
  const auto [known, is_new] = found.try_emplace(address);
  Dl_info info{};
  if (!is_new || dladdr(address, &info) == 0 || info.dli_sname == nullptr) {
    return known->second;
  }
  const std::string name = demangled(info.dli_sname);
  if (name.find("echelon::") != std::string::npos &&
      name.find("echelon::test_device::") == std::string::npos) {
    known->second = name.substr(0, name.find('('));
  }
  return known->second;
}

}  // namespace

CallStack CallStack::here() {
  CallStack stack;
  stack.size =
      ::backtrace(stack.frames.data(), static_cast<int>(stack.frames.size()));
  return stack;
}

std::string CallStack::text() const {
  std::string text;
  std::string last;
  for (int i = 0; i < size; ++i) {
    const std::string& name = function_at(frames[i]);
    if (name.empty() || name == last) continue;
    last = name;
    text += "      " + name + "\n";
  }
  return text;
}

void VectorClock::merge(const VectorClock& other) {
  if (other.times_.size() > times_.size()) {
    times_.resize(other.times_.size(), 0);
  }
  for (size_t i = 0; i < other.times_.size(); ++i) {
    times_[i] = std::max(times_[i], other.times_[i]);
  }
}

// Makes `at` a boundary of the ranges.
void Sanitizer::cut(uintptr_t at) {
  auto next = ranges_.upper_bound(at);
  if (next == ranges_.begin()) return;
  auto& [begin, range] = *std::prev(next);
  if (begin == at || range.end <= at) return;
  Range tail = range;
  range.end = at;
  ranges_.emplace_hint(next, at, std::move(tail));
}

std::vector<std::string> Sanitizer::access(
    const std::shared_ptr<const Operation>& operation, uint64_t time,
    const VectorClock& before, const std::vector<Access>& accesses) {
  std::vector<std::string> conflicts;
  const auto describe = [](const Operation& one, const std::string& tensor,
                           bool write) {
    std::string text = format(
        "    {} {} {} on stream {}", one.name, write ? "writes" : "reads",
        tensor, one.stream);
    if (!one.node.empty()) text += format(", in {}", one.node);
    if (!one.label.empty()) text += format(" (\"{}\")", one.label);
    return text + "\n" + one.stack.text();
  };
  const auto stream = static_cast<size_t>(operation->stream);
  const auto ordered = [&](const Past& past) {
    if (past.operation == nullptr || past.operation == operation) return true;
    const auto other = static_cast<size_t>(past.operation->stream);
    return other == stream || before.at(other) >= past.time;
  };
  for (const Access& access : accesses) {
    if (access.begin >= access.end) continue;
    const auto name = std::make_shared<const std::string>(access.tensor);
    const Past now{operation, time, name};
    bool told = false;
    const auto compare = [&](const Past& past, bool wrote) {
      if (told || ordered(past)) return;
      told = true;
      conflicts.push_back(
          "nothing orders these two accesses of the same memory:\n" +
          describe(*operation, access.tensor, access.write) +
          describe(*past.operation, *past.tensor, wrote));
    };
    cut(access.begin);
    cut(access.end);
    uintptr_t at = access.begin;
    auto it = ranges_.lower_bound(at);
    while (at < access.end) {
      if (it == ranges_.end() || it->first > at) {
        // Memory that nothing has touched yet.
        const uintptr_t end =
            it == ranges_.end() ? access.end : std::min(access.end, it->first);
        it = ranges_.emplace_hint(it, at, Range{.end = end});
      }
      Range& range = it->second;
      compare(range.write, true);
      if (access.write) {
        for (const Past& read : range.reads) compare(read, false);
        range.write = now;
        range.reads.clear();
      } else {
        // One read for each stream is enough: its later ones imply the others.
        std::erase_if(range.reads, [&](const Past& read) {
          return read.operation->stream == operation->stream;
        });
        range.reads.push_back(now);
      }
      at = range.end;
      ++it;
    }
    if (access.write) {
      // One range stands for the whole write.
      auto first = ranges_.lower_bound(access.begin);
      first->second.end = access.end;
      ranges_.erase(std::next(first), ranges_.lower_bound(access.end));
    }
  }
  return conflicts;
}

}  // namespace echelon::test_device
