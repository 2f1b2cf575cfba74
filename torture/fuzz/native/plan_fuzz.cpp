// Ranks' blocks: damaged, and sealed again, so that more than their checksum is tried. Plans of
// those that are taken are made, used and placed.
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "columns.h"
#include "fuzz.h"
#include "global_plan.h"
#include "packed.h"
#include "place_block.h"
#include "plan_block.h"

namespace pyckpt {
namespace {

// A block made of the input: what a rank could send.
std::string made(fuzz::Input* input) {
  PlanPacker packer;
  const uint32_t properties =
      packer.add_properties({{"float32", "torch.strided", false, 0, false}, 4});
  const uint64_t keys = input->below(8);
  for (uint64_t i = 0; i < keys; ++i) {
    const std::string name = "k" + std::to_string(input->below(6));
    const auto kind = input->below(4);
    try {
      if (kind == 0) {
        packer.add_object(name, {}, std::nullopt);
      } else if (kind == 1) {
        packer.add_path(name, {{static_cast<uint32_t>(name.size()), false}});
      } else {
        const size_t dims = input->below(4);
        std::vector<int64_t> shape(dims), offsets(dims), sizes(dims);
        for (size_t d = 0; d < dims; ++d) {
          shape[d] = input->number();
          offsets[d] = kind == 2 ? 0 : input->number();
          sizes[d] = kind == 2 ? shape[d] : input->number();
        }
        std::optional<int64_t> hint;
        if (input->below(3) == 0) hint = input->number();
        packer.add_tensor(name, {}, kind == 3, properties, shape, offsets, sizes, hint);
      }
    } catch (const std::invalid_argument&) {
      break;  // the packer is of no use then
    }
  }
  try {
    return packer.finish();
  } catch (const std::invalid_argument&) {
    return seal(PackedKind::kPlan, "");
  }
}

void use(const std::vector<GlobalPlan::Rank>& ranks, fuzz::Input* input) {
  std::unique_ptr<GlobalPlan> plan;
  try {
    plan = std::make_unique<GlobalPlan>(ranks);
  } catch (const std::invalid_argument&) {
    return;
  }
  if (!plan->conflicts().empty() || !plan->errors().empty()) return;
  REQUIRE(plan->ranks() == ranks.size());
  plan->paths();
  plan->memory_bytes();
  const Columns& columns = *plan->columns();
  std::vector<char> written(columns.item_count());
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    PlanBlock::Tables tables;
    const PlanBlock block(ranks[rank].block, &tables);
    const std::vector<uint32_t> answer = unpack_answer(plan->answer(rank), block.size());
    const std::string wrote = plan->wrote(rank);
    REQUIRE(wrote.size() == block.size());
    size_t here = 0;
    for (size_t i = 0; i < block.size(); ++i) {
      REQUIRE((answer[i] != kNotWritten) == (wrote[i] != 0));
      if (wrote[i] != 0) ++here;
    }
    REQUIRE(here == plan->written(rank));
    std::vector<PlacedItem> places(here);
    for (size_t i = 0; i < here; ++i) {
      const uint64_t item = plan->item(rank, i);
      REQUIRE(item < written.size() && written[item] == 0);
      written[item] = 1;
      places[i].place.offset = 64 * i;
      places[i].place.length = 64;
    }
    plan->place(rank, "__0_0.distcp", pack_places(places));
    // And what a rank could say that is not well.
    const std::string results = seal(PackedKind::kPlaces, input->part());
    try {
      plan->place(rank, "__0_0.distcp", results);
    } catch (const std::invalid_argument&) {
    }
  }
  for (const char one : written) REQUIRE(one == 1);
}

}  // namespace
}  // namespace pyckpt

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace pyckpt;
  fuzz::Input input(data, size);
  const size_t count = 1 + input.below(4);
  const uint64_t how = input.below(3);
  std::vector<std::string> blocks;
  for (size_t rank = 0; rank < count; ++rank) {
    if (how == 0) {
      blocks.push_back(seal(PackedKind::kPlan, input.part()));
      continue;
    }
    std::string block = made(&input);
    if (how == 2) {
      std::string body(unseal(PackedKind::kPlan, block));
      const uint64_t changes = input.below(4);
      for (uint64_t i = 0; i < changes && !body.empty(); ++i) {
        body[(input.byte() | static_cast<size_t>(input.byte()) << 8) % body.size()] =
            static_cast<char>(input.byte());
      }
      block = seal(PackedKind::kPlan, body);
    }
    blocks.push_back(std::move(block));
  }
  std::vector<std::string> wrote(count);
  std::vector<GlobalPlan::Rank> ranks;
  for (size_t rank = 0; rank < count; ++rank) {
    ranks.push_back({blocks[rank], std::nullopt});
    if (input.below(3) == 0) {
      wrote[rank] = input.part();
      ranks.back().wrote = wrote[rank];
    }
  }
  use(ranks, &input);
  return 0;
}
