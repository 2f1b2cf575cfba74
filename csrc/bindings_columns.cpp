// Columns, for Python.
#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "columns.h"

namespace pyckpt {
namespace {

using Numbers = std::vector<int64_t>;

uint32_t checked_key(const Columns& columns, int64_t key) {
  if (key < 0 || static_cast<uint64_t>(key) >= columns.key_count()) {
    throw py::index_error("no such key");
  }
  return static_cast<uint32_t>(key);
}

uint32_t checked_tensor(const Columns& columns, int64_t key, size_t dims) {
  const uint32_t checked = checked_key(columns, key);
  if (!columns.is_tensor(checked)) throw std::invalid_argument("the key is an object");
  if (columns.dims(checked) != dims) throw std::invalid_argument("of other dimensions");
  return checked;
}

py::tuple to_tuple(const int64_t* numbers, size_t count) {
  py::tuple made(count);
  for (size_t i = 0; i < count; ++i) made[i] = numbers[i];
  return made;
}

py::tuple to_tuple(const Numbers& numbers) { return to_tuple(numbers.data(), numbers.size()); }

py::tuple chunk(const Columns& columns, int64_t key, uint64_t number) {
  const uint32_t checked = checked_key(columns, key);
  if (!columns.is_tensor(checked)) throw std::invalid_argument("the key is an object");
  if (number >= columns.items_of(checked)) throw py::index_error("no such chunk");
  const size_t dims = columns.dims(checked);
  return py::make_tuple(to_tuple(columns.chunk_offsets(checked, number), dims),
                        to_tuple(columns.chunk_sizes(checked, number), dims));
}

int64_t find_chunk(const Columns& columns, int64_t key, const Numbers& offsets, int64_t hint) {
  const uint32_t checked = checked_tensor(columns, key, offsets.size());
  const auto found =
      columns.find_chunk(checked, offsets.data(), hint < 0 ? UINT64_MAX : uint64_t(hint));
  return found ? static_cast<int64_t>(*found) : -1;
}

py::list overlaps(const Columns& columns, int64_t key, const Numbers& offsets,
                  const Numbers& sizes) {
  const uint32_t checked = checked_tensor(columns, key, offsets.size());
  if (sizes.size() != offsets.size()) throw std::invalid_argument("of other dimensions");
  py::list made;
  for (const Overlap& overlap : columns.overlaps(checked, offsets.data(), sizes.data())) {
    made.append(py::make_tuple(overlap.item - columns.first_item(checked),
                               to_tuple(overlap.in_stored), to_tuple(overlap.in_wanted),
                               to_tuple(overlap.size)));
  }
  return made;
}

py::tuple place(const Columns& columns, uint64_t item) {
  if (item >= columns.item_count()) throw py::index_error("no such item");
  if (columns.file_count() == 0) throw std::invalid_argument("nothing was written yet");
  const ItemPlace place = columns.place(item);
  const std::string& file = columns.file_name(place.file);
  if (!place.is_recorded) {
    return py::make_tuple(file, place.offset, place.length, py::none(), py::none(), py::none(),
                          py::none());
  }
  const Numbers* const stride = columns.stride(item);
  return py::make_tuple(file, place.offset, place.length, place.payload_offset,
                        place.payload_length, place.crc32,
                        stride == nullptr ? py::object(py::none()) : to_tuple(*stride));
}

void set_place(Columns& columns, uint64_t item, uint32_t file, uint64_t offset, uint64_t length,
               std::optional<uint64_t> payload_offset, std::optional<uint64_t> payload_length,
               std::optional<uint32_t> crc32) {
  ItemPlace place;
  place.file = file;
  place.offset = offset;
  place.length = length;
  place.is_recorded = payload_offset.has_value();
  if (place.is_recorded) {
    place.payload_offset = *payload_offset;
    place.payload_length = payload_length.value();
    place.crc32 = crc32.value();
  }
  columns.set_place(item, place);
}

uint64_t add_chunk(Columns& columns, const Numbers& offsets, const Numbers& sizes) {
  if (columns.key_count() == 0) throw std::invalid_argument("there is no tensor yet");
  checked_tensor(columns, static_cast<int64_t>(columns.key_count()) - 1, offsets.size());
  if (sizes.size() != offsets.size()) throw std::invalid_argument("of other dimensions");
  return columns.add_chunk(offsets.data(), sizes.data());
}

py::tuple properties(const Columns& columns, int64_t key) {
  const uint32_t checked = checked_key(columns, key);
  if (!columns.is_tensor(checked)) throw std::invalid_argument("the key is an object");
  const Properties& of = columns.properties(columns.properties_of(checked));
  return py::make_tuple(of.dtype, of.layout, of.requires_grad, of.memory_format, of.pin_memory);
}

py::dict file_sizes(const Columns& columns) {
  py::dict made;
  const std::vector<uint64_t> sizes = columns.file_sizes();
  for (uint32_t file = 0; file < sizes.size(); ++file) {
    const py::str name(columns.file_name(file));
    if (made.contains(name)) {
      made[name] = std::max(made[name].cast<uint64_t>(), sizes[file]);
    } else {
      made[name] = sizes[file];
    }
  }
  return made;
}

}  // namespace

void register_columns(py::module_& module) {
  py::class_<Columns, std::shared_ptr<Columns>>(module, "Columns")
      .def(py::init<>())
      .def("__len__", &Columns::key_count)
      .def_property_readonly("item_count", &Columns::item_count)
      .def_property_readonly("file_count", &Columns::file_count)
      .def("add_file", &Columns::add_file, py::arg("name"))
      .def(
          "add_properties",
          [](Columns& columns, std::string dtype, std::string layout, bool requires_grad,
             uint8_t memory_format, bool pin_memory) {
            return columns.add_properties(
                {std::move(dtype), std::move(layout), requires_grad, memory_format, pin_memory});
          },
          py::arg("dtype"), py::arg("layout"), py::arg("requires_grad"), py::arg("memory_format"),
          py::arg("pin_memory"))
      .def("add_object", &Columns::add_object, py::arg("name"))
      .def(
          "add_tensor",
          [](Columns& columns, const std::string& name, uint32_t number, const Numbers& size) {
            return columns.add_tensor(name, number, size.data(), size.size());
          },
          py::arg("name"), py::arg("properties"), py::arg("size"))
      .def("add_chunk", &add_chunk, py::arg("offsets"), py::arg("sizes"))
      .def("set_place", &set_place, py::arg("item"), py::arg("file"), py::arg("offset"),
           py::arg("length"), py::arg("payload_offset") = py::none(),
           py::arg("payload_length") = py::none(), py::arg("crc32") = py::none())
      .def("set_stride", &Columns::set_stride, py::arg("item"), py::arg("stride"))
      .def(
          "find",
          [](const Columns& columns, const std::string& name) {
            const uint32_t key = columns.find(name);
            return key == Columns::kNone ? int64_t{-1} : int64_t{key};
          },
          py::arg("name"))
      .def(
          "name",
          [](const Columns& columns, int64_t key) {
            const std::string_view name = columns.name(checked_key(columns, key));
            return py::reinterpret_steal<py::str>(PyUnicode_DecodeUTF8(
                name.data(), static_cast<Py_ssize_t>(name.size()), "surrogatepass"));
          },
          py::arg("key"))
      .def(
          "is_tensor",
          [](const Columns& columns, int64_t key) {
            return columns.is_tensor(checked_key(columns, key));
          },
          py::arg("key"))
      .def(
          "size",
          [](const Columns& columns, int64_t key) {
            const uint32_t checked = checked_key(columns, key);
            return to_tuple(columns.size(checked), columns.dims(checked));
          },
          py::arg("key"))
      .def("properties", &properties, py::arg("key"))
      .def(
          "chunk_count",
          [](const Columns& columns, int64_t key) {
            const uint32_t checked = checked_key(columns, key);
            return columns.is_tensor(checked) ? columns.items_of(checked) : 0;
          },
          py::arg("key"))
      .def(
          "first_item",
          [](const Columns& columns, int64_t key) {
            return columns.first_item(checked_key(columns, key));
          },
          py::arg("key"))
      .def("chunk", &chunk, py::arg("key"), py::arg("number"))
      .def("find_chunk", &find_chunk, py::arg("key"), py::arg("offsets"), py::arg("hint") = -1)
      .def("overlaps", &overlaps, py::arg("key"), py::arg("offsets"), py::arg("sizes"))
      .def("place", &place, py::arg("item"))
      .def("file_sizes", &file_sizes);
}

}  // namespace pyckpt
