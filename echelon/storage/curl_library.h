// libcurl, loaded when storage is first used: its many libraries would make
// every start of the command line slower. Private to this folder.
#pragma once

#define CURL_DISABLE_TYPECHECK
#include <curl/curl.h>

namespace echelon::storage {

struct CurlLibrary {
  decltype(&curl_easy_init) easy_init;
  decltype(&curl_easy_setopt) easy_setopt;
  decltype(&curl_easy_perform) easy_perform;
  decltype(&curl_easy_getinfo) easy_getinfo;
  decltype(&curl_easy_reset) easy_reset;
  decltype(&curl_easy_cleanup) easy_cleanup;
  decltype(&curl_easy_strerror) easy_strerror;
  decltype(&curl_slist_append) slist_append;
  decltype(&curl_slist_free_all) slist_free_all;
};

/// Throws ConfigError when there is none, or one that is too old to sign.
const CurlLibrary& curl_library();

}  // namespace echelon::storage
