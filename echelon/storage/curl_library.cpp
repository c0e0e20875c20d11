#include "echelon/storage/curl_library.h"

#include <dlfcn.h>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::storage {
namespace {

constexpr const char* kLibrary = "libcurl.so.4";
constexpr unsigned kFirstVersion = 0x075800;  // 7.88.0

CurlLibrary load() {
  void* library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = ::dlerror();
    throw ConfigError(format(
        "s3:// needs {}, which cannot be loaded ({}); install libcurl4",
        kLibrary, reason == nullptr ? "no reason given" : reason));
  }
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(
        ::dlsym(library, name));
    if (function != nullptr) return;
    throw ConfigError(
        format("s3:// needs {}, which has no {}", kLibrary, name));
  };
  decltype(&curl_version_info) version = nullptr;
  find(version, "curl_version_info");
  const auto* info = version(CURLVERSION_NOW);
  if (info->version_num < kFirstVersion) {
    throw ConfigError(format(
        "s3:// needs {} of version 7.88 or newer; it is {}", kLibrary,
        info->version));
  }
  CurlLibrary curl{};
  find(curl.easy_init, "curl_easy_init");
  find(curl.easy_setopt, "curl_easy_setopt");
  find(curl.easy_perform, "curl_easy_perform");
  find(curl.easy_getinfo, "curl_easy_getinfo");
  find(curl.easy_reset, "curl_easy_reset");
  find(curl.easy_cleanup, "curl_easy_cleanup");
  find(curl.easy_strerror, "curl_easy_strerror");
  find(curl.slist_append, "curl_slist_append");
  find(curl.slist_free_all, "curl_slist_free_all");
  decltype(&curl_global_init) init = nullptr;
  find(init, "curl_global_init");
  if (init(CURL_GLOBAL_DEFAULT) != CURLE_OK) {
    throw ConfigError(format("{} cannot be initialised", kLibrary));
  }
  return curl;  // it stays loaded
}

}  // namespace

const CurlLibrary& curl_library() {
  static const CurlLibrary curl = load();
  return curl;
}

}  // namespace echelon::storage
