// The frame of every page that we write: one file, no network, light and dark.
#pragma once

#include <string>
#include <string_view>

#include "echelon/report/markup.h"

namespace echelon {

/// Whether a page holds pictures that play (pipeline_picture.h).
enum class PageScript { none, player };

/// From the doctype to <main>. Without a script the page forbids all of them.
/// `style`: what this page's own pictures need beside the style of all pages.
void open_page(
    Markup& page, const std::string& title, PageScript script,
    std::string_view style = {});

/// From </main> to the end; the page's text. Adds the script.
std::string finish_page(Markup page, PageScript script);

/// One entry of a legend: a patch of the class `color`, and what it means.
void draw_key(Markup& page, const char* color, const char* text);

}  // namespace echelon
