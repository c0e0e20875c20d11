// Pages of pipeline pictures: one file under 500 KB, without network.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "echelon/report/pipeline_picture.h"

namespace echelon {

struct PipelinePage {
  std::string title;                      // "1f1b, 4 stages, 8 microbatches"
  std::string lead;                       // a paragraph under it; may be empty
  std::vector<PipelinePicture> pictures;  // over one another, one axis
  std::vector<std::pair<std::string, std::string>> facts;  // shown below
};

std::string pipeline_page(const PipelinePage& page);

/// Its title is the picture's.
std::string pipeline_page(const PipelinePicture& picture);

}  // namespace echelon
