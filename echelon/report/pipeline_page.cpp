#include "echelon/report/pipeline_page.h"

#include <algorithm>
#include <utility>

#include "echelon/report/page.h"

namespace echelon {

std::string pipeline_page(const PipelinePage& input) {
  Markup page;
  open_page(page, input.title, PageScript::player);
  page.open("header");
  page.leaf("p", {{"class", "eyebrow"}}, "Echelon \u00b7 pipeline schedule");
  page.leaf("h1", {}, input.title).close();
  page.open("section").leaf("h2", {}, "Step by step");
  if (!input.lead.empty()) page.leaf("p", {{"class", "lead"}}, input.lead);
  // Nothing else needs the page's room.
  const size_t max_blocks = 3000 / std::max<size_t>(1, input.pictures.size());
  draw_pipelines(page, input.pictures, 0, max_blocks);
  page.close();
  if (!input.facts.empty()) {
    page.open("section").leaf("h2", {}, "In figures");
    page.open("dl", {{"class", "facts"}});
    for (const auto& [name, value] : input.facts) {
      page.open("div").leaf("dt", {}, name).leaf("dd", {}, value).close();
    }
    page.close().close();
  }
  page.leaf("footer", {}, "Written by Echelon.");
  return finish_page(std::move(page), PageScript::player);
}

std::string pipeline_page(const PipelinePicture& picture) {
  return pipeline_page(
      PipelinePage{.title = picture.title, .pictures = {picture}});
}

}  // namespace echelon
