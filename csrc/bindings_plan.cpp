// Packed plans and results, for Python.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "global_plan.h"
#include "place_block.h"
#include "plan_block.h"

namespace pyckpt {
namespace {

using Numbers = std::vector<int64_t>;
using Hint = std::optional<int64_t>;

py::tuple to_tuple(const int64_t* numbers, size_t count) {
  py::tuple made(count);
  for (size_t i = 0; i < count; ++i) made[i] = numbers[i];
  return made;
}

// --- plans
// ----------------------------------------------------------------------------------------

// The parts of a path whose name they are; none for None. Throws std::invalid_argument for a path
// that a block cannot hold.
std::vector<PathPart> to_parts(const std::string& name, const std::optional<py::tuple>& path) {
  std::vector<PathPart> parts;
  if (!path) return parts;
  std::string joined;
  for (const py::handle part : *path) {
    const bool is_number = PyLong_CheckExact(part.ptr()) != 0;
    if (!is_number && PyUnicode_CheckExact(part.ptr()) == 0) {
      throw std::invalid_argument("an entry of a path is a str or an int");
    }
    const std::string text = py::cast<std::string>(py::str(part));
    if (!parts.empty()) joined += '.';
    joined += text;
    parts.push_back({static_cast<uint32_t>(text.size()), is_number});
  }
  if (parts.empty() || joined != name)
    throw std::invalid_argument("the key is not its path, joined");
  return parts;
}

py::tuple to_path(const KeyTable& keys, uint32_t key) {
  py::tuple path(keys.part_count(key));
  std::string_view left = keys.name(key);
  for (size_t i = 0; i < keys.part_count(key); ++i) {
    const PathPart& part = keys.parts(key)[i];
    const std::string text(left.substr(0, part.size));
    path[i] = part.is_number ? py::object(py::int_(std::stoll(text))) : py::str(text);
    left.remove_prefix(std::min<size_t>(left.size(), part.size + 1));
  }
  return path;
}

py::str to_name(const KeyTable& keys, uint32_t key) {
  return py::str(keys.name(key).data(), keys.name(key).size());
}

// A block that outlives what looks into it.
struct PyPlanBlock {
  explicit PyPlanBlock(py::bytes given) : bytes(std::move(given)), block(bytes, &tables) {}

  py::tuple item(size_t index) const {
    if (index >= block.size()) throw py::index_error("no such item");
    const uint32_t key = block.key(index);
    const KeyTable& keys = *block.keys();
    const std::optional<int64_t> hint = block.hint(index);
    if (!keys.is_tensor(key)) {
      return py::make_tuple(static_cast<int>(keys.kind(key)), to_name(keys, key), hint, py::none(),
                            py::none(), py::none(), py::none());
    }
    const size_t dims = keys.dims(key);
    const Properties& of = keys.properties(key).properties;
    return py::make_tuple(
        static_cast<int>(keys.kind(key)), to_name(keys, key), hint,
        py::make_tuple(of.dtype, of.layout, of.requires_grad, of.memory_format, of.pin_memory),
        to_tuple(keys.shape(key), dims), to_tuple(block.offsets(index), dims),
        to_tuple(block.sizes(index), dims));
  }

  py::dict paths() const {
    py::dict made;
    const KeyTable& keys = *block.keys();
    for (uint32_t key = 0; key < keys.size(); ++key) {
      if (keys.part_count(key) != 0) made[to_name(keys, key)] = to_path(keys, key);
    }
    return made;
  }

  py::bytes bytes;
  PlanBlock::Tables tables;
  PlanBlock block;
};

std::shared_ptr<GlobalPlan> make_global_plan(const std::vector<py::bytes>& blocks,
                                             const std::vector<std::optional<py::bytes>>& wrote) {
  if (wrote.size() != blocks.size()) throw std::invalid_argument("one of each a rank");
  std::vector<GlobalPlan::Rank> ranks;
  for (size_t rank = 0; rank < blocks.size(); ++rank) {
    ranks.push_back({std::string_view(blocks[rank]), std::nullopt});
    if (wrote[rank]) ranks.back().wrote = std::string_view(*wrote[rank]);
  }
  GilRelease release;
  return std::make_shared<GlobalPlan>(ranks);
}

void expect_rank(const GlobalPlan& plan, size_t rank) {
  if (!plan.conflicts().empty() || !plan.errors().empty()) {
    throw std::invalid_argument("the plan must not be used: see conflicts and errors");
  }
  if (rank >= plan.ranks()) throw py::index_error("no such rank");
}

py::dict paths_of(const GlobalPlan& plan) {
  py::dict made;
  for (const auto& [keys, key] : plan.paths()) made[to_name(*keys, key)] = to_path(*keys, key);
  return made;
}

void place(GlobalPlan& plan, size_t rank, const std::string& file, const py::bytes& results) {
  expect_rank(plan, rank);
  const std::string_view view = results;
  GilRelease release;
  if (kind_of(view) == PackedKind::kChecksums) {
    plan.check(rank, file, view);
  } else {
    plan.place(rank, file, view);
  }
}

// --- results
// --------------------------------------------------------------------------------------

// As _C.WriteJob packs it: pyckpt.dcp.items.Place.
struct Words {
  uint64_t offset;
  uint64_t length;
  uint64_t payload_offset;
  uint64_t payload_length;
  uint64_t crc32;
};

std::vector<Words> to_words(std::string_view places) {
  if (places.size() % sizeof(Words) != 0) throw std::invalid_argument("not of whole places");
  std::vector<Words> words(places.size() / sizeof(Words));
  if (!words.empty()) std::memcpy(words.data(), places.data(), places.size());
  return words;
}

py::bytes pack_all(const py::bytes& places, const py::bytes& recorded,
                   const std::vector<std::pair<size_t, Numbers>>& strides) {
  const std::vector<Words> words = to_words(places);
  const std::string_view is_recorded = recorded;
  if (is_recorded.size() != words.size()) throw std::invalid_argument("one of each an item");
  std::vector<PlacedItem> items(words.size());
  for (size_t i = 0; i < words.size(); ++i) {
    const Words& of = words[i];
    items[i].place = {0,
                      of.offset,
                      of.length,
                      is_recorded[i] != 0,
                      of.payload_offset,
                      of.payload_length,
                      static_cast<uint32_t>(of.crc32)};
  }
  for (const auto& [item, stride] : strides) items.at(item).stride = stride;
  return pack_places(items);
}

std::optional<py::bytes> pack_changes(const py::bytes& before, const py::bytes& places) {
  const std::vector<Words> old = to_words(before), now = to_words(places);
  if (old.size() != now.size()) return std::nullopt;
  std::vector<uint32_t> checksums(now.size());
  for (size_t i = 0; i < now.size(); ++i) {
    if (std::memcmp(&old[i], &now[i], offsetof(Words, crc32)) != 0) return std::nullopt;
    checksums[i] = static_cast<uint32_t>(now[i].crc32);
  }
  return pack_checksums(checksums);
}

py::list unpack_all(const py::bytes& results) {
  py::list made;
  for (const PlacedItem& item : unpack_places(results)) {
    const ItemPlace& of = item.place;
    if (!of.is_recorded) {
      made.append(
          py::make_tuple(of.offset, of.length, py::none(), py::none(), py::none(), py::none()));
      continue;
    }
    const py::object stride = item.stride.empty()
                                  ? py::object(py::none())
                                  : to_tuple(item.stride.data(), item.stride.size());
    made.append(py::make_tuple(of.offset, of.length, of.payload_offset, of.payload_length, of.crc32,
                               stride));
  }
  return made;
}

}  // namespace

void register_plan(py::module_& module) {
  py::class_<PlanPacker>(module, "PlanPacker")
      .def(py::init<>())
      .def(
          "add_properties",
          [](PlanPacker& packer, std::string dtype, std::string layout, bool requires_grad,
             uint8_t memory_format, bool pin_memory, uint64_t element_size) {
            return packer.add_properties(
                {{std::move(dtype), std::move(layout), requires_grad, memory_format, pin_memory},
                 element_size});
          },
          py::arg("dtype"), py::arg("layout"), py::arg("requires_grad"), py::arg("memory_format"),
          py::arg("pin_memory"), py::arg("element_size"))
      .def(
          "add_object",
          [](PlanPacker& packer, const std::string& name, const std::optional<py::tuple>& path,
             Hint hint) { packer.add_object(name, to_parts(name, path), hint); },
          py::arg("name"), py::arg("path"), py::arg("hint"))
      .def(
          "add_tensor",
          [](PlanPacker& packer, const std::string& name, const std::optional<py::tuple>& path,
             bool is_shard, uint32_t properties, const Numbers& shape, const Numbers& offsets,
             const Numbers& sizes, Hint hint) {
            packer.add_tensor(name, to_parts(name, path), is_shard, properties, shape, offsets,
                              sizes, hint);
          },
          py::arg("name"), py::arg("path"), py::arg("is_shard"), py::arg("properties"),
          py::arg("shape"), py::arg("offsets"), py::arg("sizes"), py::arg("hint"))
      .def(
          "add_path",
          [](PlanPacker& packer, const std::string& name, const std::optional<py::tuple>& path) {
            packer.add_path(name, to_parts(name, path));
          },
          py::arg("name"), py::arg("path"))
      .def("finish", [](const PlanPacker& packer) { return py::bytes(packer.finish()); });

  py::class_<PyPlanBlock>(module, "PlanBlock")
      .def(py::init<py::bytes>(), py::arg("block"))
      .def("__len__", [](const PyPlanBlock& block) { return block.block.size(); })
      .def("item", &PyPlanBlock::item, py::arg("index"))
      .def("paths", &PyPlanBlock::paths);

  py::class_<GlobalPlan, std::shared_ptr<GlobalPlan>>(module, "GlobalPlan")
      .def(py::init(&make_global_plan), py::arg("blocks"), py::arg("wrote"))
      .def_property_readonly("conflicts", &GlobalPlan::conflicts)
      .def_property_readonly("errors", &GlobalPlan::errors)
      .def_property_readonly("columns", &GlobalPlan::columns)
      .def_property_readonly("memory_bytes", &GlobalPlan::memory_bytes)
      .def(
          "written",
          [](const GlobalPlan& plan, size_t rank) {
            expect_rank(plan, rank);
            return plan.written(rank);
          },
          py::arg("rank"))
      .def(
          "answer",
          [](const GlobalPlan& plan, size_t rank) {
            expect_rank(plan, rank);
            return py::bytes(plan.answer(rank));
          },
          py::arg("rank"))
      .def(
          "wrote",
          [](const GlobalPlan& plan, size_t rank) {
            expect_rank(plan, rank);
            return py::bytes(plan.wrote(rank));
          },
          py::arg("rank"))
      .def("paths", &paths_of)
      .def("place", &place, py::arg("rank"), py::arg("file"), py::arg("results"));

  module.def(
      "unpack_answer",
      [](const py::bytes& answer, size_t items) { return unpack_answer(answer, items); },
      py::arg("answer"), py::arg("items"));
  module.def("pack_places", &pack_all, py::arg("places"), py::arg("recorded"), py::arg("strides"));
  module.def("pack_checksums", &pack_changes, py::arg("before"), py::arg("places"));
  module.def("unpack_places", &unpack_all, py::arg("results"));
  module.def(
      "unpack_checksums", [](const py::bytes& results) { return unpack_checksums(results); },
      py::arg("results"));
}

}  // namespace pyckpt
