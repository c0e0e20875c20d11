#include "echelon/data/images/image.h"

#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <zlib.h>

#include <cmath>
#include <filesystem>
#include <set>

#include "tests/data/make_image.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::image_test {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr int64_t kMaxPixels = 178956970;

class ImageFile : public testing::Test {
 protected:
  Raster decode(const std::string& content, double reduction = 1.0) {
    decoder_.open(folder_.write("i", content), kMaxPixels);
    return decoder_.decode(reduction);
  }
  /// The error for a file of that content.
  std::string
  refusal(const std::string& content, int64_t max_pixels = kMaxPixels) {
    const std::string path = folder_.write("i", content);
    return error_text<DataError>([&] {
      decoder_.open(path, max_pixels);
      decoder_.decode(1.0);
    });
  }
  static std::vector<int> pixel(const Raster& raster, int64_t x, int64_t y) {
    const uint8_t* p = raster.pixels + 4 * (y * raster.width + x);
    return {p[0], p[1], p[2]};
  }
  void expect_test_pixels(const Raster& raster, int most_difference) {
    const auto want = test_pixels(
        static_cast<int>(raster.width), static_cast<int>(raster.height));
    int largest = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      const int got = raster.pixels[i / 3 * 4 + i % 3];
      largest = std::max(largest, std::abs(got - want[i]));
    }
    EXPECT_LE(largest, most_difference);
  }

  TempFolder folder_;
  ImageDecoder decoder_;
};

TEST_F(ImageFile, ReadsPngExactly) {
  const Raster raster = decode(make_png(37, 23));
  EXPECT_EQ(raster.width, 37);
  EXPECT_EQ(raster.height, 23);
  expect_test_pixels(raster, 0);
  expect_test_pixels(decode(make_png(37, 23, true)), 0);
  expect_test_pixels(decode(make_png(1, 1)), 0);
}

TEST_F(ImageFile, TurnsEveryPngIntoRgb) {
  const auto at = [&](int colour, int depth, std::vector<uint8_t> row) {
    return pixel(decode(make_png(1, 1, colour, depth, row)), 0, 0);
  };
  EXPECT_THAT(at(PNG_COLOR_TYPE_GRAY, 8, {77}), ElementsAre(77, 77, 77));
  EXPECT_THAT(at(PNG_COLOR_TYPE_GRAY, 1, {0x80}), ElementsAre(255, 255, 255));
  EXPECT_THAT(at(PNG_COLOR_TYPE_GRAY, 16, {77, 200}), ElementsAre(77, 77, 77));
  EXPECT_THAT(
      at(PNG_COLOR_TYPE_RGB, 16, {1, 0, 2, 255, 3, 0}), ElementsAre(1, 2, 3));
  EXPECT_THAT(at(PNG_COLOR_TYPE_GRAY_ALPHA, 8, {9, 0}), ElementsAre(9, 9, 9));
  EXPECT_THAT(
      at(PNG_COLOR_TYPE_RGB_ALPHA, 8, {1, 2, 3, 0}), ElementsAre(1, 2, 3));
  EXPECT_THAT(at(PNG_COLOR_TYPE_PALETTE, 8, {1}), ElementsAre(0, 255, 0));
  EXPECT_THAT(at(PNG_COLOR_TYPE_PALETTE, 2, {0x80}), ElementsAre(0, 0, 255));
}

TEST_F(ImageFile, ReadsEveryKindOfJpeg) {
  expect_test_pixels(decode(make_jpeg(64, 48, TJSAMP_444)), 40);
  expect_test_pixels(
      decode(make_jpeg(64, 48, TJSAMP_444, TJFLAG_PROGRESSIVE)), 40);
  const auto grey = pixel(decode(make_jpeg(16, 16, TJSAMP_GRAY)), 9, 9);
  EXPECT_EQ(grey[0], grey[1]);
  EXPECT_EQ(grey[1], grey[2]);
  EXPECT_EQ(decode(make_jpeg(1, 1)).width, 1);
  EXPECT_EQ(decode(make_jpeg(3, 4000)).height, 4000);
}

TEST_F(ImageFile, DecodesJpegsSmallerWhenAsked) {
  const std::string jpeg = make_jpeg(101, 64);
  for (const auto& [asked, got] : std::vector<std::pair<double, int64_t>>{
           {0.3, 1}, {1.99, 1}, {2.0, 2}, {3.9, 2}, {4.5, 4}, {100, 8}}) {
    const Raster raster = decode(jpeg, asked);
    EXPECT_EQ(raster.reduction, got) << asked;
    EXPECT_EQ(raster.width, (101 + got - 1) / got);
    EXPECT_EQ(raster.height, 64 / got);
  }
  EXPECT_EQ(decode(make_png(64, 64), 8).reduction, 1);
}

TEST_F(ImageFile, EveryCutIsRefused) {
  for (const std::string& whole :
       {make_jpeg(200, 150),
        make_jpeg(200, 150, TJSAMP_444, TJFLAG_PROGRESSIVE), make_png(200, 150),
        make_png(200, 150, true)}) {
    for (size_t sixteenth = 0; sixteenth < 16; ++sixteenth) {
      const auto cut = whole.substr(0, whole.size() * sixteenth / 16);
      EXPECT_THAT(refusal(cut), HasAll(folder_.path("i"), "broken"))
          << sixteenth;
    }
    EXPECT_NE(refusal(whole.substr(0, whole.size() - 3)), "no error");
    // The decoder is as good as new after each of them.
    EXPECT_EQ(refusal(whole), "no error");
  }
}

TEST_F(ImageFile, FlippedBytesDoNotCrash) {
  for (const std::string& whole : {make_jpeg(60, 40), make_png(60, 40)}) {
    for (size_t i = 0; i < whole.size(); i += 3) {
      std::string flipped = whole;
      flipped[i] = static_cast<char>(flipped[i] ^ (1 << i % 8));
      refusal(flipped);
      flipped[i] = static_cast<char>(0xff);
      refusal(flipped);
    }
    EXPECT_EQ(refusal(whole), "no error");
  }
}

TEST_F(ImageFile, RefusesWhatIsNoImage) {
  EXPECT_THAT(refusal(""), HasSubstr("the file is empty"));
  EXPECT_THAT(refusal("hello, world"), HasSubstr("neither JPEG nor PNG"));
  EXPECT_THAT(refusal("GIF89a"), HasSubstr("neither JPEG nor PNG"));
  EXPECT_THAT(refusal("\xff\xd8\xff"), HasSubstr("broken image"));
  const auto open = [&](const std::string& name) {
    return error_text([&] { decoder_.open(folder_.path(name), kMaxPixels); });
  };
  EXPECT_THAT(open("none"), HasAll("/none", "No such"));
  folder_.make_folder("folder");
  EXPECT_THAT(open("folder"), HasSubstr("is not a file"));
  ASSERT_EQ(::mkfifo(folder_.path("pipe").c_str(), 0600), 0);
  EXPECT_THAT(open("pipe"), HasSubstr("is not a file"));
}

TEST_F(ImageFile, RefusesTooManyPixelsBeforeDecoding) {
  // A header of 50,000 x 50,000 and nothing else: 10 GB if it were believed.
  std::string header("\0\0\xc3\x50\0\0\xc3\x50\x08\x02\0\0\0", 13);
  const std::string bomb = "\x89PNG\r\n\x1a\n" + png_chunk("IHDR", header) +
                           png_chunk("IDAT", "") + png_chunk("IEND", "");
  EXPECT_THAT(
      refusal(bomb),
      HasAll("50000x50000 pixels are more than 178956970", "max_image_pixels"));
  EXPECT_THAT(refusal(make_png(20, 20), 399), HasSubstr("20x20 pixels"));
  EXPECT_EQ(refusal(make_png(20, 20), 400), "no error");
  EXPECT_THAT(refusal(make_jpeg(20, 20), 399), HasSubstr("20x20 pixels"));
  // Sides that would overflow when multiplied.
  header.replace(0, 8, std::string("\x7f\xff\xff\xff\x7f\xff\xff\xff", 8));
  EXPECT_NE(
      refusal("\x89PNG\r\n\x1a\n" + png_chunk("IHDR", header)), "no error");
}

TEST_F(ImageFile, PackedProfilesAndTextsAreNotUnpacked) {
  // 64 MiB of zeros, packed to 64 KiB, in chunks that do not matter.
  const std::string zeros(size_t{64} << 20, '\0');
  std::string packed(1 << 17, '\0');
  uLongf length = packed.size();
  ASSERT_EQ(
      ::compress(
          reinterpret_cast<Bytef*>(packed.data()), &length,
          reinterpret_cast<const Bytef*>(zeros.data()), zeros.size()),
      Z_OK);
  packed.resize(length);
  const std::string good = make_png(8, 8);
  const std::string start = good.substr(0, 33), rest = good.substr(33);
  for (const std::string type : {"iCCP", "zTXt"}) {
    std::string chunks;
    for (int i = 0; i < 40; ++i) {
      chunks += png_chunk(type, std::string("name\0\0", 6) + packed);
    }
    EXPECT_EQ(refusal(start + chunks + rest), "no error");
    EXPECT_EQ(decode(start + chunks + rest).width, 8);
  }
  rusage usage = {};
  ::getrusage(RUSAGE_SELF, &usage);
  EXPECT_LT(usage.ru_maxrss, 400 << 10) << "KiB";
}

std::vector<float>
part(const std::vector<float>& all, ptrdiff_t begin, ptrdiff_t count) {
  return {all.begin() + begin, all.begin() + begin + count};
}

class Resize : public testing::Test {
 protected:
  /// A raster of one value per channel and column: R = x, G = y, B = 7.
  Raster ramp(int64_t width, int64_t height) {
    pixels_.assign(static_cast<size_t>(4 * width * height) + 64, 0);
    for (int64_t y = 0; y < height; ++y) {
      for (int64_t x = 0; x < width; ++x) {
        uint8_t* p = pixels_.data() + 4 * (y * width + x);
        p[0] = static_cast<uint8_t>(x);
        p[1] = static_cast<uint8_t>(y);
        p[2] = 7;
      }
    }
    return {width, height, pixels_.data(), 1};
  }
  std::vector<float>
  run(const Raster& raster, const ResizePlan& plan, int64_t size) {
    std::vector<float> output(static_cast<size_t>(3 * size * size) + 1, -1.0f);
    resizer_.run(raster, plan, size, {{1, 1, 1}, {0, 0, 0}}, output.data());
    EXPECT_EQ(output.back(), -1.0f) << "written behind the end";
    output.pop_back();
    return output;
  }

  std::vector<uint8_t> pixels_;
  Resizer resizer_;
};

TEST_F(Resize, SameSizeIsACopy) {
  const auto out = run(ramp(5, 5), center_plan({5, 5}, 5), 5);
  for (size_t i = 0; i < 25; ++i) {
    EXPECT_EQ(out[i], static_cast<float>(i % 5));
    EXPECT_EQ(out[25 + i], static_cast<float>(i / 5));
    EXPECT_EQ(out[50 + i], 7.0f);
  }
}

TEST_F(Resize, CentreAndFlip) {
  ResizePlan plan = center_plan({9, 4}, 4);
  EXPECT_EQ(plan.width, 9);
  EXPECT_EQ(plan.window_left, 2);  // 2.5 goes to the even number
  auto out = run(ramp(9, 4), plan, 4);
  EXPECT_THAT(part(out, 0, 4), ElementsAre(2, 3, 4, 5));
  plan.flip = true;
  out = run(ramp(9, 4), plan, 4);
  EXPECT_THAT(part(out, 0, 4), ElementsAre(5, 4, 3, 2));
  EXPECT_THAT(part(out, 16, 4), ElementsAre(0, 0, 0, 0));
}

TEST_F(Resize, HalvesByATriangle) {
  // Width 4 to 2: pixels 0 1 2 with weights 3 3 1, then 1 2 3 with 1 3 3.
  const auto out = run(ramp(4, 4), center_plan({4, 4}, 2), 2);
  EXPECT_THAT(part(out, 0, 2), ElementsAre(1, 2));  // 5/7 and 16/7, rounded
}

TEST_F(Resize, EverySizeStaysInItsBounds) {
  for (int64_t width : {1, 2, 3, 7, 31, 32, 33, 250}) {
    for (int64_t height : {1, 5, 64}) {
      for (int64_t size : {1, 2, 3, 5, 8, 30, 70}) {
        const auto out =
            run(ramp(width, height), center_plan({width, height}, size), size);
        for (const float blue :
             std::vector<float>(out.begin() + 2 * size * size, out.end())) {
          ASSERT_EQ(blue, 7.0f) << width << "x" << height << " to " << size;
        }
      }
    }
  }
}

TEST_F(Resize, VectorWidthChangesNothing) {
  Resizer narrow(false);
  const Normalise normalise = Normalise::from({0.4, 0.5, 0.6}, {0.2, 0.3, 0.1});
  for (int64_t size : {1, 7, 8, 17, 40}) {
    for (const auto& image : std::vector<ImageDecoder::Size>{
             {100, 83}, {41, 40}, {9, 200}, {1, 1}}) {
      const Raster raster = ramp(image.width, image.height);
      const auto elements = static_cast<size_t>(3 * size * size);
      std::vector<float> a(elements), b(elements);
      for (const ResizePlan& plan :
           {center_plan(image, size),
            random_plan(image, size, true, 1, 2, 3)}) {
        resizer_.run(raster, plan, size, normalise, a.data());
        narrow.run(raster, plan, size, normalise, b.data());
        EXPECT_EQ(a, b) << image.width << "x" << image.height << " to " << size;
      }
    }
  }
}

TEST_F(Resize, HugeAspectRatioCostsNothing) {
  const ResizePlan plan = center_plan({1, 60000}, 224);
  EXPECT_EQ(plan.height, 13440000);
  EXPECT_EQ(run(ramp(1, 60000), plan, 224)[2 * 224 * 224], 7.0f);
  const ResizePlan wide = center_plan({60000, 1}, 16);
  EXPECT_EQ(run(ramp(60000, 1), wide, 16)[512], 7.0f);
}

TEST(RandomPlan, StaysInTheImageAndTheRanges) {
  std::set<double> lefts;
  int flips = 0;
  double area = 0;
  for (int64_t index = 0; index < 2000; ++index) {
    const auto plan = random_plan({400, 300}, 224, true, 5, 1, index);
    EXPECT_GE(plan.left, 0);
    EXPECT_GE(plan.top, 0);
    EXPECT_LE(plan.right, 400);
    EXPECT_LE(plan.bottom, 300);
    const double ratio = (plan.right - plan.left) / (plan.bottom - plan.top);
    EXPECT_GT(ratio, 0.73);
    EXPECT_LT(ratio, 1.36);
    lefts.insert(plan.left);
    flips += plan.flip;
    area += (plan.right - plan.left) * (plan.bottom - plan.top) / 120000.0;
  }
  EXPECT_GT(lefts.size(), 100);
  EXPECT_NEAR(flips, 1000, 120);
  // torchvision's own mean for this shape; boxes that stick out are redrawn.
  EXPECT_NEAR(area / 2000, 0.433, 0.02);
  EXPECT_EQ(
      random_plan({400, 300}, 224, true, 5, 1, 3).left,
      random_plan({400, 300}, 224, true, 5, 1, 3).left);
  EXPECT_NE(
      random_plan({400, 300}, 224, true, 5, 1, 3).right,
      random_plan({400, 300}, 224, true, 5, 2, 3).right);
  // No box of an allowed ratio fits: the largest in the centre.
  const auto strip = random_plan({1000, 10}, 224, false, 5, 1, 0);
  EXPECT_EQ(strip.bottom - strip.top, 10);
  EXPECT_EQ(strip.right - strip.left, 13);
  EXPECT_EQ(random_plan({1, 1}, 224, false, 5, 1, 0).right, 1);
}

}  // namespace echelon::image_test
