// Where items lie in a file and how it is cut into windows: small ones literally, random ones by
// what must hold of all.
#include "image.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "support.h"

namespace pyckpt {
namespace {

using namespace test;

// "offset+size: part begin+size @at, ..." with a '!' where the window is written in place.
std::string text(const Image& image, const Window& window) {
  std::string text = std::to_string(window.offset) + "+" + std::to_string(window.size) +
                     (window.in_place ? "!:" : ":");
  for (const Piece& piece : window.pieces) {
    size_t number = 0;
    while (&image.items()[number] != piece.item) ++number;
    text += std::string(" ") + "gpds"[static_cast<int>(piece.part)] + std::to_string(number) + "[" +
            std::to_string(piece.begin) + "+" + std::to_string(piece.size) + "]@" +
            std::to_string(piece.at);
  }
  return text;
}

std::vector<std::string> texts(const Image& image, const std::vector<Window>& windows) {
  std::vector<std::string> texts;
  for (const Window& window : windows) texts.push_back(text(image, window));
  return texts;
}

std::shared_ptr<Envelope> envelope(size_t prefix, size_t suffix, size_t payload) {
  Random random(1);
  return make_envelope(random, prefix, suffix, payload);
}

Source host(uint64_t size, uintptr_t address = 1 << 20) {
  Source source;
  source.data = reinterpret_cast<const std::byte*>(address);  // an image looks at none of it
  source.size = size;
  return source;
}

using Texts = std::vector<std::string>;

TEST(Image, NothingIsNoWindow) {
  Image image({4096, 4096, 512});
  std::vector<Window> windows;
  image.finish(&windows);
  EXPECT_TRUE(windows.empty());
  EXPECT_EQ(image.size(), 0u);
}

TEST(Image, EmptyItemsAreNoWindow) {
  Image image({4096, 4096, 512});
  std::vector<Window> windows;
  const Item& item = image.add(nullptr, host(0), &windows);
  image.finish(&windows);
  EXPECT_TRUE(windows.empty());
  EXPECT_EQ(image.size(), 0u);
  EXPECT_EQ(item.length, 0u);
  EXPECT_EQ(item.pieces_left.load(), 0u);
}

TEST(Image, SmallItemsLieBackToBack) {
  Image image({4096, 4096, 512});
  std::vector<Window> windows;
  const Item& a = image.add(envelope(100, 50, 1000), host(1000), &windows);
  const Item& b = image.add(nullptr, host(7), &windows);
  const Item& c = image.add(envelope(100, 50, 0), host(0), &windows);
  EXPECT_TRUE(windows.empty());
  image.finish(&windows);
  EXPECT_EQ(texts(image, windows), (Texts{"0+1307: p0[0+100]@0 d0[0+1000]@100 s0[0+50]@1100 "
                                          "d1[0+7]@1150 p2[0+100]@1157 s2[0+50]@1257"}));
  EXPECT_EQ(a.offset, 0u);
  EXPECT_EQ(a.length, 1150u);
  EXPECT_EQ(a.payload_offset, 100u);
  EXPECT_EQ(b.offset, 1150u);
  EXPECT_EQ(b.length, 7u);
  EXPECT_EQ(b.payload_offset, 0u);
  EXPECT_EQ(c.offset, 1157u);
  EXPECT_EQ(c.payload_offset, 100u);
  EXPECT_EQ(image.size(), 1307u);
}

TEST(Image, AWindowEndsInTheMiddleOfAPart) {
  Image image({4096, 4096, 512});
  std::vector<Window> windows;
  const Item& a = image.add(envelope(4000, 4200, 100), host(100), &windows);
  EXPECT_EQ(a.pieces_left.load(), 2u);
  image.finish(&windows);
  EXPECT_EQ(texts(image, windows),
            (Texts{"0+4096: p0[0+4000]@0 d0[0+96]@4000", "4096+4096: d0[96+4]@0 s0[0+4092]@4",
                   "8192+108: s0[4092+108]@0"}));
}

TEST(Image, AnItemThatEndsWithAWindowLeavesNoEmptyOne) {
  Image image({4096, 4096, 512});
  std::vector<Window> windows;
  image.add(nullptr, host(8192), &windows);
  EXPECT_EQ(windows.size(), 2u);
  image.finish(&windows);
  EXPECT_EQ(texts(image, windows), (Texts{"0+4096: d0[0+4096]@0", "4096+4096: d0[4096+4096]@0"}));
}

// The gap before the second is no piece: what no piece covers is zero.
TEST(Image, LargePayloadsBeginOnAPage) {
  Image image({1 << 20, 4096, 512});
  std::vector<Window> windows;
  image.add(envelope(100, 50, 65535), host(65535), &windows);
  const Item& b = image.add(envelope(100, 50, 65536), host(65536), &windows);
  image.finish(&windows);
  EXPECT_EQ(texts(image, windows),
            (Texts{"0+135218: p0[0+100]@0 d0[0+65535]@100 s0[0+50]@65635 p1[0+100]@69532 "
                   "d1[0+65536]@69632 s1[0+50]@135168"}));
  EXPECT_EQ(b.offset, 69532u);
  EXPECT_EQ(b.offset + b.payload_offset, 17u * 4096);
}

TEST(Image, InPlaceWindowsStandAlone) {
  Image image({1 << 20, 4096, 512});
  std::vector<Window> windows;
  const Item& a = image.add(envelope(100, 50, (3 << 19) + 10), host((3 << 19) + 10), &windows);
  EXPECT_EQ(a.pieces_left.load(), 3u);
  image.finish(&windows);
  EXPECT_EQ(
      texts(image, windows),
      (Texts{"0+4096: p0[0+100]@3996", "4096+1048576!: d0[0+1048576]@0",
             "1052672+524288!: d0[1048576+524288]@0", "1576960+60: d0[1572864+10]@0 s0[0+50]@10"}));
}

TEST(Image, InPlaceOnlyWhereAllowed) {
  constexpr uint64_t kSize = 1 << 20;
  const auto in_place = [](Source source, Image::Options options) {
    Image image(options);
    std::vector<Window> windows;
    image.add(envelope(10, 10, source.size), source, &windows);
    image.finish(&windows);
    uint64_t bytes = 0;
    for (const Window& window : windows) bytes += window.in_place ? window.size : 0;
    return bytes;
  };
  const Image::Options usual{1 << 20, 4096, 512};
  EXPECT_EQ(in_place(host(kSize), usual), kSize);
  EXPECT_EQ(in_place(host(kSize + 4095), usual), kSize);
  EXPECT_EQ(in_place(host(kSize, (1 << 20) + 512), usual), kSize);
  EXPECT_EQ(in_place(host(kSize - 1), usual), 0u);
  EXPECT_EQ(in_place(host(kSize, (1 << 20) + 4), usual), 0u);
  // Memory as torch allocates it, 64 bytes behind a page: of disks that ask for 4 bytes, as NVMe
  // does, it is written from where it is; of those that ask for 512, never, since a payload begins
  // on a page of the file.
  EXPECT_EQ(in_place(host(kSize, (1 << 20) + 64), {1 << 20, 4096, 4}), kSize);
  EXPECT_EQ(in_place(host(kSize, (1 << 20) + 64), usual), 0u);
  EXPECT_EQ(in_place(host(kSize, (1 << 20) + 1), {1 << 20, 4096, 1}), kSize);  // buffered
  EXPECT_EQ(in_place(host(kSize), {1 << 20, 8192, 512}), 0u);  // a payload at an odd page
  Source strided = host(kSize);
  strided.strided =
      std::make_shared<Strided>(std::vector<int64_t>{1 << 20}, std::vector<int64_t>{2}, size_t{1});
  EXPECT_EQ(in_place(strided, usual), 0u);
  Source device = host(kSize);
  device.device = std::make_shared<FakeDevice>();
  EXPECT_EQ(in_place(device, usual), 0u);
}

// What must hold of every image.
void check_image(const Image& image, const Image::Options& options,
                 const std::vector<Window>& windows) {
  // The windows cover the file, in order, without overlap.
  uint64_t end = 0;
  for (size_t i = 0; i < windows.size(); ++i) {
    const Window& window = windows[i];
    ASSERT_EQ(window.offset, end);
    ASSERT_EQ(window.offset % options.alignment, 0u);
    ASSERT_GT(window.size, 0u);
    ASSERT_LE(window.size, options.slot_bytes);
    if (i + 1 < windows.size()) {
      ASSERT_EQ(window.size % options.alignment, 0u);
    }
    end += window.size;
  }
  ASSERT_EQ(end, image.size());

  // The items follow one another; gaps come before large payloads alone, and no larger than need.
  uint64_t items_end = 0;
  for (const Item& item : image.items()) {
    ASSERT_GE(item.offset, items_end);
    if (item.source.size >= 65536) {
      ASSERT_EQ((item.offset + item.payload_offset) % 4096, 0u);
      ASSERT_LT(item.offset - items_end, 4096u);
    } else {
      ASSERT_EQ(item.offset, items_end);
    }
    items_end = item.offset + item.length;
  }
  ASSERT_EQ(items_end, image.size());

  // Each part of each item is covered by its pieces, in order, at its place in the file.
  std::map<std::pair<const Item*, Part>, uint64_t> covered;
  std::map<const Item*, uint32_t> payload_pieces;
  for (const Window& window : windows) {
    uint64_t filled = 0;
    for (const Piece& piece : window.pieces) {
      const Item& item = *piece.item;
      ASSERT_NE(piece.part, Part::kGap);
      ASSERT_GT(piece.size, 0u);
      ASSERT_GE(piece.at, filled);
      filled = piece.at + piece.size;
      ASSERT_LE(filled, window.size);
      uint64_t& done = covered[{&item, piece.part}];
      ASSERT_EQ(piece.begin, done);
      done += piece.size;
      uint64_t part_at = item.offset;
      if (piece.part != Part::kPrefix) part_at += item.payload_offset;
      if (piece.part == Part::kSuffix) part_at += item.source.size;
      ASSERT_EQ(window.offset + piece.at, part_at + piece.begin);
      if (piece.part == Part::kPayload) ++payload_pieces[&item];
    }
    if (window.in_place) {
      ASSERT_EQ(window.pieces.size(), 1u);
      const Piece& piece = window.pieces[0];
      ASSERT_EQ(piece.part, Part::kPayload);
      ASSERT_EQ(piece.at, 0u);
      ASSERT_EQ(piece.size, window.size);
      ASSERT_EQ(window.size % options.alignment, 0u);
      ASSERT_EQ(reinterpret_cast<uintptr_t>(piece.item->source.data + piece.begin) %
                    options.in_place_memory,
                0u);
      ASSERT_FALSE(piece.item->source.device || piece.item->source.strided);
      ASSERT_GE(piece.item->source.size, uint64_t{1} << 20);
    }
  }
  for (const Item& item : image.items()) {
    const uint64_t prefix = item.envelope ? item.envelope->prefix.size() : 0;
    const uint64_t suffix = item.envelope ? item.envelope->suffix.size() : 0;
    ASSERT_EQ((covered[{&item, Part::kPrefix}]), prefix);
    ASSERT_EQ((covered[{&item, Part::kPayload}]), item.source.size);
    ASSERT_EQ((covered[{&item, Part::kSuffix}]), suffix);
    ASSERT_EQ(item.payload_offset, prefix);
    ASSERT_EQ(item.length, prefix + item.source.size + suffix);
    ASSERT_EQ(item.pieces_left.load(), payload_pieces[&item]);
    ASSERT_EQ(item.pieces_held.load(), payload_pieces[&item]);
  }
}

TEST(Image, RandomItems) {
  Random random(2);
  size_t in_place = 0;
  for (int round = 0; round < 300; ++round) {
    Image::Options options;
    options.alignment = 4096 << draw(random, 0, 2);
    options.slot_bytes = options.alignment * draw(random, 1, draw(random, 1, 400));
    options.in_place_memory = uint64_t{1} << draw(random, 0, 12);
    Image image(options);
    std::vector<Window> windows;
    const size_t items = draw(random, 0, 30);
    for (size_t i = 0; i < items; ++i) {
      const uint64_t size = std::vector<uint64_t>{0,
                                                  1,
                                                  4095,
                                                  4096,
                                                  4097,
                                                  65535,
                                                  65536,
                                                  65537,
                                                  options.slot_bytes,
                                                  options.slot_bytes + 1,
                                                  (1 << 20) - 1,
                                                  1 << 20,
                                                  (1 << 20) + 1,
                                                  draw(random, 0, 100000),
                                                  draw(random, 0, 5 << 20)}[draw(random, 0, 14)];
      Source source = host(size, 4096 * draw(random, 1, 9) + draw(random, 0, 1) * 512);
      if (draw(random, 0, 9) == 0) source.device = std::make_shared<FakeDevice>();
      std::shared_ptr<Envelope> around;
      if (draw(random, 0, 2) != 0) {
        around = envelope(draw(random, 0, 9000), draw(random, 0, 2000), size);
      }
      const size_t before = windows.size();
      const uint64_t end_before = image.size();
      image.add(around, source, &windows);
      ASSERT_GE(image.size(), end_before + size);
      // Windows are handed over as soon as they are full: less than a slot stays behind.
      uint64_t handed = windows.empty() ? 0 : windows.back().offset + windows.back().size;
      ASSERT_LT(image.size() - handed, options.slot_bytes);
      for (size_t w = before; w < windows.size(); ++w) in_place += windows[w].in_place;
    }
    image.finish(&windows);
    ASSERT_NO_FATAL_FAILURE(check_image(image, options, windows)) << "round " << round;
  }
  EXPECT_GT(in_place, 100u);  // the mix has them
}

}  // namespace
}  // namespace pyckpt
