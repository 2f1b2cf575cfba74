// The shape of a state dict: which containers, which keys, tensors of which dtypes and shapes. Told
// apart from another state dict's without a line of Python per entry.
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>

#include <utility>
#include <vector>

#include "bindings.h"

namespace pyckpt {
namespace {

// What DCP takes apart (torch/distributed/checkpoint/_traverse.py): mappings, and lists in which
// there is, at any depth of lists, a mapping or a tensor. Anything else it pickles as a whole.
bool is_container(PyObject* object) {
  if (PyDict_Check(object)) return true;
  if (!PyList_CheckExact(object)) return false;
  const Level level;
  py::object entry;
  for (Py_ssize_t i = 0; (entry = entry_of(object, i)); ++i) {
    if (THPVariable_Check(entry.ptr()) || is_container(entry.ptr())) return true;
  }
  return false;
}

// Names, made with the module: a thread that waits for another one's initialisation of a static
// would keep a Python without the GIL from collecting garbage, which the other may wait for.
PyObject* create_write_items = nullptr;
PyObject* global_offsets = nullptr;

// Whether DCP asks the object itself which parts of what it holds (`plans_itself` in
// pyckpt/dcp/leaves.py): an attribute that may come and go while type and shape stay.
bool plans_itself(PyObject* object) {
  return PyObject_HasAttr(object, create_write_items) != 0 ||
         PyObject_HasAttr(object, global_offsets) != 0;
}

class StateTree {
 public:
  explicit StateTree(const py::handle& state_dict) { describe(state_dict.ptr()); }

  // The leaves of a state dict of this shape, in order; none for one of another shape. Of tensors
  // that are more than memory only the type is compared.
  py::object match(const py::handle& state_dict) const {
    py::list leaves(leaves_);
    Cursor cursor{0, 0};
    if (!matches(state_dict.ptr(), &cursor, leaves.ptr())) return py::none();
    return std::move(leaves);
  }

  // A state dict of this shape, of plain dicts and lists, with other leaves.
  py::object build(const py::list& leaves) const {
    if (leaves.size() != leaves_) throw std::invalid_argument("not as many leaves as the tree has");
    Cursor cursor{0, 0};
    return py::reinterpret_steal<py::object>(rebuild(&cursor, leaves.ptr()));
  }

  size_t size() const { return leaves_; }

 private:
  enum class Kind { kDict, kList, kTensor, kObject };
  struct Node {
    Kind kind;
    py::object type;
    std::vector<py::object> keys;  // of a dict
    size_t children = 0;
    bool plans_itself = false;  // a leaf
    // Of a tensor that is plain memory:
    bool plain = false;
    bool requires_grad = false;
    at::ScalarType dtype = at::ScalarType::Undefined;
    c10::Layout layout = at::kStrided;
    std::vector<int64_t> sizes, strides;
  };
  struct Cursor {
    size_t node;
    size_t leaf;
  };

  static bool has_sizes(const at::Tensor& tensor) {
    return !tensor.key_set().has(c10::DispatchKey::Python) && tensor.layout() == at::kStrided;
  }

  void describe(PyObject* object) {
    const Level level;
    const size_t at = nodes_.size();
    nodes_.emplace_back();
    nodes_[at].type =
        py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(Py_TYPE(object)));
    if (PyDict_Check(object)) {
      nodes_[at].kind = Kind::kDict;
      const CriticalSection section(object);
      PyObject *key, *value;
      Py_ssize_t position = 0;
      while (PyDict_Next(object, &position, &key, &value) != 0) {
        const auto held = py::reinterpret_borrow<py::object>(value);
        nodes_[at].keys.push_back(py::reinterpret_borrow<py::object>(key));
        describe(value);
      }
      // Not as many as there were before: what is described may change what it is in.
      nodes_[at].children = nodes_[at].keys.size();
    } else if (is_container(object)) {
      nodes_[at].kind = Kind::kList;
      py::object entry;
      for (Py_ssize_t i = 0; (entry = entry_of(object, i)); ++i) {
        describe(entry.ptr());
        ++nodes_[at].children;
      }
    } else {
      ++leaves_;
      nodes_[at].plans_itself = plans_itself(object);
      nodes_[at].kind = THPVariable_Check(object) ? Kind::kTensor : Kind::kObject;
      if (nodes_[at].kind == Kind::kTensor)
        describe_tensor(THPVariable_Unpack(object), &nodes_[at]);
    }
  }

  static void describe_tensor(const at::Tensor& tensor, Node* node) {
    node->plain = has_sizes(tensor);
    if (!node->plain) return;
    node->requires_grad = tensor.requires_grad();
    node->dtype = tensor.scalar_type();
    node->layout = tensor.layout();
    node->sizes = tensor.sizes().vec();
    node->strides = tensor.strides().vec();
  }

  static bool same_tensor(const at::Tensor& tensor, const Node& node) {
    if (has_sizes(tensor) != node.plain) return false;
    return !node.plain || (tensor.scalar_type() == node.dtype && tensor.layout() == node.layout &&
                           tensor.requires_grad() == node.requires_grad &&
                           tensor.sizes() == node.sizes && tensor.strides() == node.strides);
  }

  bool matches(PyObject* object, Cursor* cursor, PyObject* leaves) const {
    const Level level;
    const Node& node = nodes_[cursor->node++];
    if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != node.type.ptr()) return false;
    switch (node.kind) {
      case Kind::kDict: {
        if (static_cast<size_t>(PyDict_Size(object)) != node.children) return false;
        const CriticalSection section(object);
        PyObject *key, *value;
        Py_ssize_t position = 0;
        size_t i = 0;
        for (; i < node.children && PyDict_Next(object, &position, &key, &value) != 0; ++i) {
          PyObject* const expected = node.keys[i].ptr();
          // Comparing keys of a program's own class runs its code, which may take them away.
          const auto held = py::reinterpret_borrow<py::object>(value);
          const auto held_key = py::reinterpret_borrow<py::object>(key);
          if (key != expected) {
            // Equal is not enough: True == 1, but their names differ.
            if (Py_TYPE(key) != Py_TYPE(expected)) return false;
            const int equal = PyObject_RichCompareBool(key, expected, Py_EQ);
            if (equal < 0) throw py::error_already_set();
            if (equal == 0) return false;
          }
          if (!matches(value, cursor, leaves)) return false;
        }
        return i == node.children && static_cast<size_t>(PyDict_Size(object)) == node.children;
      }
      case Kind::kList: {
        if (static_cast<size_t>(PyList_GET_SIZE(object)) != node.children) return false;
        for (size_t i = 0; i < node.children; ++i) {
          const py::object entry = entry_of(object, static_cast<Py_ssize_t>(i));
          if (!entry || !matches(entry.ptr(), cursor, leaves)) return false;
        }
        return static_cast<size_t>(PyList_GET_SIZE(object)) == node.children;
      }
      case Kind::kTensor:
        if (!same_tensor(THPVariable_Unpack(object), node)) return false;
        break;
      case Kind::kObject:
        if (is_container(object)) return false;  // a list of numbers that now has a tensor in it
        break;
    }
    if (plans_itself(object) != node.plans_itself) return false;
    Py_INCREF(object);
    PyList_SET_ITEM(leaves, static_cast<Py_ssize_t>(cursor->leaf++), object);
    return true;
  }

  PyObject* rebuild(Cursor* cursor, PyObject* leaves) const {
    const Node& node = nodes_[cursor->node++];
    if (node.kind == Kind::kDict) {
      py::dict dict;
      for (const py::object& key : node.keys) {
        const auto value = py::reinterpret_steal<py::object>(rebuild(cursor, leaves));
        if (PyDict_SetItem(dict.ptr(), key.ptr(), value.ptr()) != 0) throw py::error_already_set();
      }
      return dict.release().ptr();
    }
    if (node.kind == Kind::kList) {
      py::list list(node.children);
      for (size_t i = 0; i < node.children; ++i) {
        PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), rebuild(cursor, leaves));
      }
      return list.release().ptr();
    }
    PyObject* const leaf = PyList_GET_ITEM(leaves, static_cast<Py_ssize_t>(cursor->leaf++));
    Py_INCREF(leaf);
    return leaf;
  }

  std::vector<Node> nodes_;  // depth first
  size_t leaves_ = 0;
};

}  // namespace

void register_state_tree(py::module_& module) {
  create_write_items = PyUnicode_InternFromString("__create_write_items__");
  global_offsets = PyUnicode_InternFromString("global_offsets");
  if (create_write_items == nullptr || global_offsets == nullptr) throw py::error_already_set();
  py::class_<StateTree>(module, "StateTree")
      .def(py::init<const py::object&>(), py::arg("state_dict"))
      .def("match", &StateTree::match, py::arg("state_dict"))
      .def("build", &StateTree::build, py::arg("leaves"))
      .def("__len__", &StateTree::size);
}

}  // namespace pyckpt
