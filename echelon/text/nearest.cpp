#include "echelon/text/nearest.h"

#include <algorithm>
#include <cctype>

namespace echelon::config {
namespace {

std::string normal(std::string_view word) {
  std::string text;
  for (char c : word) {
    text +=
        c == '-'
            ? '_'
            : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return text;
}

// Edits: insert, delete, replace, swap two neighbours.
size_t distance(const std::string& a, const std::string& b) {
  std::vector<std::vector<size_t>> edits(
      a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) {
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        edits[i][j] = i + j;
        continue;
      }
      const size_t replaced = edits[i - 1][j - 1] + (a[i - 1] != b[j - 1]);
      edits[i][j] =
          std::min({edits[i - 1][j] + 1, edits[i][j - 1] + 1, replaced});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        edits[i][j] = std::min(edits[i][j], edits[i - 2][j - 2] + 1);
      }
    }
  }
  return edits[a.size()][b.size()];
}

std::string initials(const std::string& name) {
  std::string text;
  for (size_t i = 0; i < name.size(); ++i) {
    if (i == 0 || name[i - 1] == '_') text += name[i];
  }
  return text;
}

bool extends(const std::string& longer, const std::string& shorter) {
  return shorter.size() >= 3 && longer.size() > shorter.size() &&
         (longer.compare(0, shorter.size(), shorter) == 0 ||
          longer.compare(
              longer.size() - shorter.size(), shorter.size(), shorter) == 0);
}

}  // namespace

std::string
nearest(std::string_view word, const std::vector<std::string>& candidates) {
  const std::string wanted = normal(word.substr(0, 100));
  std::string best;
  size_t best_distance = wanted.size() <= 3 ? 2 : 3 + wanted.size() / 6;
  for (const auto& candidate : candidates) {
    const size_t edits = distance(wanted, normal(candidate));
    // A name of which every letter changed is another name.
    if (edits < best_distance && edits < candidate.size()) {
      best_distance = edits;
      best = candidate;
    }
  }
  if (!best.empty()) return best;
  for (const auto& candidate : candidates) {
    const std::string name = normal(candidate);
    if ((wanted.size() >= 2 && initials(name) == wanted) ||
        extends(name, wanted) || extends(wanted, name)) {
      return candidate;
    }
  }
  return "";
}

std::string did_you_mean(
    std::string_view word, const std::vector<std::string>& candidates) {
  const std::string found = nearest(word, candidates);
  return found.empty() ? "" : "; did you mean \"" + found + "\"?";
}

}  // namespace echelon::config
