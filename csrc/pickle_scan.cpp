#include "pickle_scan.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace pyckpt {
namespace {

// Names of classes end up in messages.
constexpr uint64_t kNameMax = 1000;
// Python itself refuses to read longer ones as text.
constexpr uint64_t kNumberMax = 5000;
constexpr uint64_t kMany = uint64_t{1} << 60;  // sums stop there

uint64_t add(uint64_t a, uint64_t b) { return std::min(kMany, a + b); }

uint32_t narrow(uint64_t count) {
  return static_cast<uint32_t>(std::min<uint64_t>(count, UINT32_MAX));
}

// What is known of a value. Values are numbered; those below kAtoms are numbers, strings and the
// like, by their length.
struct Node {
  uint32_t depth;
  uint32_t entries;     // of a container; bytes of a string
  uint32_t below;       // entries of the containers and strings that are its entries
  uint64_t weight = 1;  // values in it at any depth, as often as they are met
};
using Value = uint32_t;
constexpr Value kAtoms = 256;
constexpr Value kNothing = std::numeric_limits<Value>::max();

class Scanner {
 public:
  Scanner(const std::byte* data, size_t size, const PickleLimits& limits)
      : data_(reinterpret_cast<const unsigned char*>(data)),
        size_(size),
        limits_(limits),
        work_left_(kFreeWork + limits.work_per_byte * uint64_t{size}) {
    for (uint32_t length = 0; length < kAtoms; ++length) nodes_.push_back({0, length, 0});
  }

  size_t run() {
    while (!step()) ++opcodes_;
    return at_;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw std::invalid_argument(what + ", at byte " + std::to_string(opcode_at_));
  }

  // --- the bytes ---

  const unsigned char* take(uint64_t count) {
    if (count > size_ - at_) fail("the pickle is cut off");
    const unsigned char* const from = data_ + at_;
    at_ += count;
    return from;
  }

  uint64_t number(size_t bytes) {
    const unsigned char* const from = take(bytes);
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; ++i) value |= uint64_t{from[i]} << (8 * i);
    return value;
  }

  // Bytes up to the end of the line.
  uint64_t line(uint64_t most) {
    const void* const end = std::memchr(data_ + at_, '\n', std::min(size_ - at_, most + 1));
    if (end == nullptr) fail("a line is cut off, or too long");
    const uint64_t length =
        static_cast<uint64_t>(static_cast<const unsigned char*>(end) - (data_ + at_));
    at_ += length + 1;
    return length;
  }

  uint64_t number_of_line() {
    const size_t begin = at_;
    const uint64_t length = line(20);
    uint64_t value = 0;
    for (size_t i = begin; i < begin + length; ++i) {
      if (data_[i] < '0' || data_[i] > '9') fail("a number is none");
      value = add(value * 10, data_[i] - '0');
    }
    return value;
  }

  // --- the stack ---

  size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }

  void push(Value value) { stack_.push_back(value); }

  Value pop() {
    if (stack_.size() <= floor()) fail("something is taken from an empty stack");
    const Value value = stack_.back();
    stack_.pop_back();
    return value;
  }

  Value top() const {
    if (stack_.size() <= floor()) fail("the stack is empty");
    return stack_.back();
  }

  // Where the values since the last mark begin; the mark goes, the values stay.
  size_t take_mark() {
    if (marks_.empty()) fail("no mark was set");
    const size_t begin = marks_.back();
    marks_.pop_back();
    return begin;
  }

  // --- values ---

  void push_atom(size_t bytes) {
    take(bytes);
    push(1);
  }

  void push_string(uint64_t length) {
    take(length);
    if (length < kAtoms) return push(static_cast<Value>(length));
    push(make({0, narrow(length), 0}));
  }

  Value make(const Node& node) {
    if (nodes_.size() == kNothing) fail("it holds too much");
    nodes_.push_back(node);
    return static_cast<Value>(nodes_.size() - 1);
  }

  // Puts a value into a container that exists.
  void put(Node* into, Value value) {
    const Node& inner = nodes_[value];
    into->entries = narrow(uint64_t{into->entries} + 1);
    into->below = narrow(uint64_t{into->below} + inner.entries);
    into->weight = add(into->weight, inner.weight);
    into->depth = std::max(into->depth, inner.depth + 1);
    if (into->depth > limits_.depth) {
      fail("it is nested more than " + std::to_string(limits_.depth) + " deep");
    }
  }

  Node* container() {
    const Value value = top();
    if (value < kAtoms) fail("something is put into what is no container");
    return &nodes_[value];
  }

  void push_container(size_t begin) {
    Node node{1, 0, 0};
    for (size_t i = begin; i < stack_.size(); ++i) put(&node, stack_[i]);
    stack_.resize(begin);
    push(make(node));
  }

  void push_last(size_t count) {
    if (stack_.size() < floor() + count) fail("something is taken from an empty stack");
    push_container(stack_.size() - count);
  }

  void spend(uint64_t work) {
    if (work > work_left_) fail("reading it would take more than its size explains");
    work_left_ -= work;
  }

  // Keys and values, or with a step of 1 keys alone, that are put into the container below.
  void put_hashed(size_t begin, size_t step) {
    if ((stack_.size() - begin) % step != 0) fail("a key has no value");
    for (size_t i = begin; i < stack_.size(); i += step) spend(nodes_[stack_[i]].weight);
    put_all(begin);
  }

  void put_all(size_t begin) {
    const std::vector<Value> values(stack_.begin() + static_cast<ptrdiff_t>(begin), stack_.end());
    stack_.resize(begin);
    Node* const into = container();
    for (const Value value : values) put(into, value);
  }

  // The result is a thing of its own, which may have as many entries as there were values to make
  // it of.
  void call(size_t values) {
    if (stack_.size() < floor() + values) fail("something is taken from an empty stack");
    Node result{1, 0, 0};
    uint64_t given = 0;
    for (size_t i = stack_.size() - values; i < stack_.size(); ++i) {
      const Node& node = nodes_[stack_[i]];
      given = add(given, add(node.weight, uint64_t{node.entries} + node.below));
      put(&result, stack_[i]);
    }
    spend(given);
    result = {result.depth, narrow(given), 0, add(1, given)};
    stack_.resize(stack_.size() - values);
    push(make(result));
  }

  // The entries of a state, or of the two dicts that it is, are copied; not what is in them.
  void build() {
    const Value state = pop();
    spend(uint64_t{nodes_[state].entries} + nodes_[state].below);
    if (top() >= kAtoms) put(container(), state);  // what reads it refuses to alter a number
  }

  // --- what is remembered ---

  void remember(uint64_t index) {
    if (index > opcodes_)
      fail("what is remembered has the impossible number " + std::to_string(index));
    if (index >= memo_.size())
      memo_.resize(std::max<size_t>(index + 1, 2 * memo_.size()), kNothing);
    if (memo_[index] == kNothing) ++remembered_;
    memo_[index] = top();
  }

  void recall(uint64_t index) {
    if (index >= memo_.size() || memo_[index] == kNothing) fail("something was never remembered");
    push(memo_[index]);
  }

  bool step();

  const unsigned char* const data_;
  const size_t size_;
  const PickleLimits limits_;
  uint64_t work_left_;
  size_t at_ = 0;
  size_t opcode_at_ = 0;
  uint64_t opcodes_ = 0;
  std::vector<Node> nodes_;
  std::vector<Value> stack_;
  std::vector<size_t> marks_;
  std::vector<Value> memo_;
  size_t remembered_ = 0;
};

// One opcode; whether it was STOP. See pickletools.py of Python for what they are.
bool Scanner::step() {
  opcode_at_ = at_;
  const unsigned char opcode = *take(1);
  switch (opcode) {
    case '.':  // STOP
      pop();
      return true;
    case 0x80:  // PROTO
      take(1);
      break;
    case 0x95:  // FRAME
      if (number(8) > size_ - at_) fail("the pickle is cut off");
      break;

    // Numbers and the like.
    case 'N':   // NONE
    case 0x88:  // NEWTRUE
    case 0x89:  // NEWFALSE
      push(0);
      break;
    case 'K':  // BININT1
      push_atom(1);
      break;
    case 'M':  // BININT2
      push_atom(2);
      break;
    case 'J':  // BININT
      push_atom(4);
      break;
    case 'G':  // BINFLOAT
      push_atom(8);
      break;
    case 'I':  // INT
    case 'L':  // LONG
    case 'F':  // FLOAT
      line(kNumberMax);
      push(1);
      break;
    case 0x8a:  // LONG1
      push_string(number(1));
      break;
    case 0x8b:  // LONG4
      push_string(number(4));
      break;

    // Strings.
    case 'S':  // STRING
    case 'V':  // UNICODE
    {
      const size_t begin = at_;
      const uint64_t length = line(size_);
      at_ = begin;
      push_string(length);
      take(1);
      break;
    }
    case 'U':   // SHORT_BINSTRING
    case 'C':   // SHORT_BINBYTES
    case 0x8c:  // SHORT_BINUNICODE
      push_string(number(1));
      break;
    case 'T':  // BINSTRING
    case 'B':  // BINBYTES
    case 'X':  // BINUNICODE
      push_string(number(4));
      break;
    case 0x8d:  // BINUNICODE8
    case 0x8e:  // BINBYTES8
    case 0x96:  // BYTEARRAY8
      push_string(number(8));
      break;

    // Containers.
    case ')':   // EMPTY_TUPLE
    case ']':   // EMPTY_LIST
    case '}':   // EMPTY_DICT
    case 0x8f:  // EMPTY_SET
      push(make({1, 0, 0}));
      break;
    case 't':  // TUPLE
    case 'l':  // LIST
      push_container(take_mark());
      break;
    case 0x85:  // TUPLE1
    case 0x86:  // TUPLE2
    case 0x87:  // TUPLE3
      push_last(opcode - 0x84u);
      break;
    case 'd':     // DICT
    case 0x91: {  // FROZENSET
      const size_t begin = take_mark();
      const size_t step = opcode == 'd' ? 2 : 1;
      stack_.insert(stack_.begin() + static_cast<ptrdiff_t>(begin), make({1, 0, 0}));
      put_hashed(begin + 1, step);
      break;
    }
    case 'a':  // APPEND
      if (stack_.size() < floor() + 2) fail("something is taken from an empty stack");
      put_all(stack_.size() - 1);
      break;
    case 'e':  // APPENDS
      put_all(take_mark());
      break;
    case 's':  // SETITEM
      if (stack_.size() < floor() + 3) fail("something is taken from an empty stack");
      put_hashed(stack_.size() - 2, 2);
      break;
    case 'u':  // SETITEMS
      put_hashed(take_mark(), 2);
      break;
    case 0x90:  // ADDITEMS
      put_hashed(take_mark(), 1);
      break;

    // The stack.
    case '(':  // MARK
      marks_.push_back(stack_.size());
      break;
    case '0':  // POP
      if (!marks_.empty() && stack_.size() == marks_.back()) {
        marks_.pop_back();
      } else {
        pop();
      }
      break;
    case '1':  // POP_MARK
      stack_.resize(take_mark());
      break;
    case '2':  // DUP
      push(top());
      break;

    // What is remembered.
    case 'p':  // PUT
      remember(number_of_line());
      break;
    case 'q':  // BINPUT
      remember(number(1));
      break;
    case 'r':  // LONG_BINPUT
      remember(number(4));
      break;
    case 0x94:  // MEMOIZE
      remember(remembered_);
      break;
    case 'g':  // GET
      recall(number_of_line());
      break;
    case 'h':  // BINGET
      recall(number(1));
      break;
    case 'j':  // LONG_BINGET
      recall(number(4));
      break;

    // Names, and what is done with them.
    case 'c':  // GLOBAL
      line(kNameMax);
      line(kNameMax);
      push(1);
      break;
    case 0x93:  // STACK_GLOBAL
      for (int i = 0; i < 2; ++i) {
        if (nodes_[pop()].entries > kNameMax) fail("a name is too long");
      }
      push(1);
      break;
    case 'R':   // REDUCE
    case 0x81:  // NEWOBJ
      call(2);
      break;
    case 0x92:  // NEWOBJ_EX
      call(3);
      break;
    case 'b':  // BUILD
      build();
      break;
    case 'Q':  // BINPERSID
      call(1);
      break;
    default:
      // Extensions, buffers from elsewhere, and what only the first pickles had.
      fail("the opcode " + std::to_string(opcode) + " is not one that is written here");
  }
  return false;
}

}  // namespace

size_t scan_pickle(const std::byte* data, size_t size, const PickleLimits& limits) {
  return Scanner(data, size, limits).run();
}

}  // namespace pyckpt
