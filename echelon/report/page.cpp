#include "echelon/report/page.h"

#include <utility>

#include "echelon/report/pipeline_picture.h"
#include "echelon/report/pipeline_script.h"
#include "echelon/report/pipeline_style.h"
#include "echelon/report/report_style.h"
#include "echelon/report/tensor_style.h"

namespace echelon {

void open_page(
    Markup& page, const std::string& title, PageScript script,
    std::string_view style) {
  const bool plays = script == PageScript::player;
  page.raw("<!DOCTYPE html>\n");
  page.open("html", {{"lang", "en"}}).open("head");
  page.raw("<meta charset=\"utf-8\">\n");
  page.raw(
      "<meta http-equiv=\"Content-Security-Policy\" "
      "content=\"default-src 'none'; style-src 'unsafe-inline'");
  if (plays) page.raw("; script-src 'unsafe-inline'");
  page.raw("\">\n");
  page.raw(
      "<meta name=\"viewport\" content=\"width=device-width, "
      "initial-scale=1\">\n");
  page.leaf("title", {}, title + " \u00b7 Echelon");
  page.open("style").raw(detail::kReportStyle).raw(detail::kTensorStyle);
  if (plays) page.raw(detail::kPipelineStyle);
  page.raw(style).close().close();
  page.open("body").open("main");
  if (plays) draw_pipeline_patterns(page);
}

std::string finish_page(Markup page, PageScript script) {
  page.close();
  if (script == PageScript::player) {
    page.open("script").raw(detail::kPipelineScript).close();
  }
  page.close().close();
  return std::move(page).finish() + "\n";
}

void draw_key(Markup& page, const char* color, const char* text) {
  page.open("span", {{"class", "key"}});
  page.open(
      "svg", {{"class", "swatch"},
              {"width", "18"},
              {"height", "12"},
              {"aria-hidden", "true"}});
  page.empty("rect", {{"class", color}, {"width", "18"}, {"height", "12"}});
  page.close().text(text).close();
}

}  // namespace echelon
