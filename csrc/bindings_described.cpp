// What DCP's objects say of a checkpoint, taken down in columns: for metadata that stock's planner
// made. Whatever is not as stock makes it is left to Python.
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "bindings.h"
#include "columns.h"

namespace pyckpt {
namespace {

using Numbers = std::vector<int64_t>;

// Thrown within this file where something has no place in columns.
struct NotStocks {};

// Names of attributes, and the classes of the objects that have them.
class Described {
 public:
  Described(const py::dict& types, py::dict dtypes, py::dict layouts, py::dict memory_formats)
      : tensor_(types["tensor"]),
        bytes_(types["bytes"]),
        chunk_(types["chunk"]),
        index_(types["index"]),
        properties_(types["properties"]),
        info_(types["info"]),
        dtypes_(std::move(dtypes)),
        layouts_(std::move(layouts)),
        memory_formats_(std::move(memory_formats)) {}

  std::shared_ptr<Columns> columns(const py::dict& keys, const py::dict& places) const {
    auto columns = std::make_shared<Columns>();
    columns->reserve(keys.size(), places.size(), 0);
    size_t steps = 0;
    for (const auto& [name, value] : keys) {
      let_others_run(++steps);
      add_key(columns.get(), name, value);
    }
    std::vector<bool> is_placed(columns->item_count(), false);
    std::unordered_map<std::string, uint32_t> files;
    for (const auto& [index, info] : places) {
      let_others_run(++steps);
      const uint64_t item = find(*columns, index);
      if (is_placed[item]) throw NotStocks();
      is_placed[item] = true;
      place(columns.get(), item, info, &files);
    }
    if (places.size() != columns->item_count()) throw NotStocks();
    return columns;
  }

 private:
  static py::object get(py::handle object, const char* name) {
    // An attribute that is not there is the program's to be told of, by pickle.
    py::object value = py::getattr(object, name, py::none());
    return value;
  }

  static void let_others_run(size_t steps) {
    constexpr size_t kStepsAtATime = 256;  // less than a millisecond
    if (steps % kStepsAtATime != 0) return;
    const GilRelease release;
  }

  // An object with more than its class's fields has something that columns would lose.
  static void check_class(py::handle object, py::handle type, size_t fields) {
    if (!py::type::handle_of(object).is(type)) throw NotStocks();
    const py::object known = get(object, "__dict__");
    if (PyDict_CheckExact(known.ptr()) == 0 ||
        static_cast<size_t>(PyDict_GET_SIZE(known.ptr())) > fields) {
      throw NotStocks();
    }
  }

  static std::string_view text(py::handle object) {
    Py_ssize_t size = 0;
    if (PyUnicode_CheckExact(object.ptr()) == 0) throw NotStocks();
    const char* const bytes = PyUnicode_AsUTF8AndSize(object.ptr(), &size);
    if (bytes == nullptr) {  // it has half of a surrogate pair
      PyErr_Clear();
      throw NotStocks();
    }
    return {bytes, static_cast<size_t>(size)};
  }

  template <typename Number>
  static Number number(py::handle object) {
    if (PyLong_CheckExact(object.ptr()) == 0) throw NotStocks();
    const long long value = PyLong_AsLongLong(object.ptr());
    if (value == -1 && PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      throw NotStocks();
    }
    const auto converted = static_cast<Number>(value);
    if (value < 0 || static_cast<long long>(converted) != value) throw NotStocks();
    return converted;
  }

  static bool truth(py::handle object) {
    if (PyBool_Check(object.ptr()) == 0) throw NotStocks();
    return object.ptr() == Py_True;
  }

  // torch.Size is a tuple.
  static void numbers(const py::object& object, Numbers* made) {
    if (PyTuple_Check(object.ptr()) == 0) throw NotStocks();
    made->clear();
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object.ptr()); ++i) {
      made->push_back(number<int64_t>(PyTuple_GET_ITEM(object.ptr(), i)));
    }
  }

  void add_key(Columns* columns, py::handle name, py::handle value) const {
    if (py::type::handle_of(value).is(bytes_)) {
      check_class(value, bytes_, 0);
      columns->add_object(text(name));
      return;
    }
    // First, since what stands for stock's object until somebody looks becomes one by that.
    const py::object chunks = get(value, "chunks");
    check_class(value, tensor_, 3);
    Numbers size;
    numbers(get(value, "size"), &size);
    const uint32_t properties = columns->add_properties(properties_of(get(value, "properties")));
    columns->add_tensor(text(name), properties, size.data(), size.size());
    if (PyList_CheckExact(chunks.ptr()) == 0) throw NotStocks();
    Numbers offsets;
    Numbers sizes;
    for (const py::handle chunk : py::reinterpret_borrow<py::list>(chunks)) {
      check_class(chunk, chunk_, 2);
      numbers(get(chunk, "offsets"), &offsets);
      numbers(get(chunk, "sizes"), &sizes);
      if (offsets.size() != size.size() || sizes.size() != size.size()) throw NotStocks();
      columns->add_chunk(offsets.data(), sizes.data());
    }
  }

  Properties properties_of(const py::object& object) const {
    // Torch 2.15 has a sixth, which nobody needs (pyckpt/format/metadata.py).
    check_class(object, properties_, py::hasattr(object, "strides") ? 6 : 5);
    Properties made;
    made.dtype = text(named(dtypes_, get(object, "dtype")));
    made.layout = text(named(layouts_, get(object, "layout")));
    made.requires_grad = truth(get(object, "requires_grad"));
    made.memory_format = number<uint8_t>(named(memory_formats_, get(object, "memory_format")));
    made.pin_memory = truth(get(object, "pin_memory"));
    return made;
  }

  static py::handle named(const py::dict& names, const py::object& object) {
    PyObject* const name = PyDict_GetItemWithError(names.ptr(), object.ptr());
    if (name == nullptr) {
      PyErr_Clear();
      throw NotStocks();
    }
    return name;
  }

  uint64_t find(const Columns& columns, py::handle index) const {
    check_class(index, index_, 3);
    const uint32_t key = columns.find(text(get(index, "fqn")));
    if (key == Columns::kNone) throw NotStocks();
    const py::object offset = get(index, "offset");
    if (columns.is_tensor(key) == offset.is_none()) throw NotStocks();
    if (offset.is_none()) return columns.first_item(key);
    Numbers offsets;
    numbers(offset, &offsets);
    if (offsets.size() != columns.dims(key)) throw NotStocks();
    const py::object hint = get(index, "index");
    const auto chunk = columns.find_chunk(key, offsets.data(),
                                          hint.is_none() ? UINT64_MAX : number<uint32_t>(hint));
    if (!chunk) throw NotStocks();
    return columns.first_item(key) + *chunk;
  }

  void place(Columns* columns, uint64_t item, py::handle info,
             std::unordered_map<std::string, uint32_t>* files) const {
    check_class(info, info_, SIZE_MAX);
    const py::dict known = info.attr("__dict__");
    const auto have = [&](const char* name) -> py::handle {
      return PyDict_GetItemString(known.ptr(), name);
    };
    size_t count = 3;
    const auto optional = [&](const char* name) {
      const py::handle value = have(name);
      if (value) ++count;
      return value;
    };
    const py::handle name = have("relative_path");
    const py::handle offset = have("offset");
    const py::handle length = have("length");
    if (!name || !offset || !length) throw NotStocks();
    const py::handle transforms = optional("transform_descriptors");
    if (transforms && !transforms.is_none()) throw NotStocks();
    ItemPlace place;
    const auto [file, is_new] = files->try_emplace(std::string(text(name)), 0);
    if (is_new) file->second = columns->add_file(file->first);
    place.file = file->second;
    place.offset = number<uint64_t>(offset);
    place.length = number<uint64_t>(length);
    const py::handle payload_offset = optional("payload_offset");
    const py::handle payload_length = optional("payload_length");
    const py::handle crc32 = optional("crc32");
    const py::handle stride = optional("payload_stride");
    if (payload_offset || payload_length || crc32 || stride) {
      if (!payload_offset || !payload_length || !crc32) throw NotStocks();
      place.is_recorded = true;
      place.payload_offset = number<uint64_t>(payload_offset);
      place.payload_length = number<uint64_t>(payload_length);
      place.crc32 = number<uint32_t>(crc32);
    }
    if (count != known.size()) throw NotStocks();  // it knows of something else
    columns->set_place(item, place);
    if (stride && !stride.is_none()) {
      Numbers made;
      numbers(py::reinterpret_borrow<py::object>(stride), &made);
      columns->set_stride(item, std::move(made));
    }
  }

  py::object tensor_;
  py::object bytes_;
  py::object chunk_;
  py::object index_;
  py::object properties_;
  py::object info_;
  py::dict dtypes_;
  py::dict layouts_;
  py::dict memory_formats_;
};

}  // namespace

void register_described(py::module_& module) {
  module.def(
      "columns_from",
      [](const py::dict& keys, const py::dict& places, const py::dict& types,
         const py::dict& dtypes, const py::dict& layouts,
         const py::dict& memory_formats) -> std::shared_ptr<Columns> {
        try {
          // Copies, since other threads run in between.
          return Described(types, dtypes, layouts, memory_formats)
              .columns(py::reinterpret_steal<py::dict>(PyDict_Copy(keys.ptr())),
                       py::reinterpret_steal<py::dict>(PyDict_Copy(places.ptr())));
        } catch (const NotStocks&) {
          return nullptr;
        }
      },
      py::arg("keys"), py::arg("places"), py::kw_only(), py::arg("types"), py::arg("dtypes"),
      py::arg("layouts"), py::arg("memory_formats"));
}

}  // namespace pyckpt
