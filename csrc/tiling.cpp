#include "tiling.h"

#include <algorithm>
#include <stdexcept>

namespace pyckpt {
namespace {

// Comparisons that are waited for, at most: a second or so.
constexpr size_t kWorkMax = size_t{1} << 26;
// As torch's own operators have it.
constexpr size_t kDimensionsMax = 64;

// Boxes, each counted so many times, some of them less than zero. They cancel if, over all boxes
// that an element is in, these numbers add up to zero, and that for each element.
//
// Along one dimension, the boxes that an element is in change only where one begins or ends. So
// boxes cancel if at each such place those that begin there and, counted negatively, those that end
// there cancel in the dimensions that are left. In a grid a box ends where one begins that is the
// same in all other dimensions; both are gone before these are looked at.
class Boxes {
 public:
  struct Term {
    int64_t count;
    size_t box;
  };

  Boxes(size_t dimensions, std::vector<int64_t> begins, std::vector<int64_t> ends)
      : dimensions_(dimensions), begins_(std::move(begins)), ends_(std::move(ends)) {}

  bool cancel(std::vector<Term> terms, size_t dimension) {
    merge(&terms, dimension);
    if (terms.empty()) return true;
    if (dimension == dimensions_) return false;
    struct Event {
      int64_t at;
      Term term;
    };
    std::vector<Event> events;
    events.reserve(2 * terms.size());
    for (const Term& term : terms) {
      events.push_back({begin(term.box, dimension), term});
      events.push_back({end(term.box, dimension), {-term.count, term.box}});
    }
    std::sort(events.begin(), events.end(),
              [](const Event& a, const Event& b) { return a.at < b.at; });
    for (size_t i = 0; i < events.size();) {
      std::vector<Term> here;
      for (const int64_t at = events[i].at; i < events.size() && events[i].at == at; ++i) {
        here.push_back(events[i].term);
      }
      if (!cancel(std::move(here), dimension + 1)) return false;
    }
    return true;
  }

 private:
  int64_t begin(size_t box, size_t dimension) const {
    return begins_[box * dimensions_ + dimension];
  }
  int64_t end(size_t box, size_t dimension) const { return ends_[box * dimensions_ + dimension]; }

  // The order of two boxes by what they are from a dimension on: negative, zero or positive.
  int compare(size_t a, size_t b, size_t dimension) const {
    for (size_t d = dimension; d < dimensions_; ++d) {
      if (begin(a, d) != begin(b, d)) return begin(a, d) < begin(b, d) ? -1 : 1;
      if (end(a, d) != end(b, d)) return end(a, d) < end(b, d) ? -1 : 1;
    }
    return 0;
  }

  // Makes one of the terms whose boxes are the same from a dimension on.
  void merge(std::vector<Term>* terms, size_t dimension) {
    work_ += terms->size() * (dimensions_ - dimension);  // of each that differ only at the end
    if (work_ > kWorkMax) throw std::invalid_argument("its parts are too many to be compared");
    std::sort(terms->begin(), terms->end(),
              [&](const Term& a, const Term& b) { return compare(a.box, b.box, dimension) < 0; });
    std::vector<Term> merged;
    for (const Term& term : *terms) {
      if (!merged.empty() && compare(merged.back().box, term.box, dimension) == 0) {
        merged.back().count += term.count;
      } else {
        if (!merged.empty() && merged.back().count == 0) merged.pop_back();
        merged.push_back(term);
      }
    }
    if (!merged.empty() && merged.back().count == 0) merged.pop_back();
    terms->swap(merged);
  }

  const size_t dimensions_;
  const std::vector<int64_t> begins_;
  const std::vector<int64_t> ends_;
  size_t work_ = 0;
};

// Whether the boxes are the cells of a grid, each once: what nearly all tensors are cut into, and
// told in a fraction of the time. `begins` and `ends` are of boxes within a tensor of this size.
bool is_grid(const std::vector<int64_t>& size, const std::vector<int64_t>& begins,
             const std::vector<int64_t>& ends) {
  const size_t dimensions = size.size(), count = begins.size() / dimensions;
  if (count == 0) return false;
  std::vector<size_t> cells(count);  // of each box, the number of the cell that it is
  std::vector<int64_t> cuts(count);
  size_t all = 1;
  for (size_t d = 0; d < dimensions; ++d) {
    cuts.resize(count);
    for (size_t i = 0; i < count; ++i) cuts[i] = begins[i * dimensions + d];
    std::sort(cuts.begin(), cuts.end());
    cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
    if (cuts.front() != 0 || cuts.size() > count / all) return false;
    all *= cuts.size();
    for (size_t i = 0; i < count; ++i) {
      const int64_t begin = begins[i * dimensions + d];
      const auto at =
          cuts.size() == 1 ? cuts.begin() : std::lower_bound(cuts.begin(), cuts.end(), begin);
      const int64_t next = at + 1 == cuts.end() ? size[d] : at[1];
      if (ends[i * dimensions + d] != next) return false;
      cells[i] = cells[i] * cuts.size() + static_cast<size_t>(at - cuts.begin());
    }
  }
  if (all != count) return false;
  std::vector<bool> is_there(count);
  for (const size_t cell : cells) {
    if (is_there[cell]) return false;
    is_there[cell] = true;
  }
  return true;
}

}  // namespace

bool is_tiling(const std::vector<int64_t>& size, const std::vector<int64_t>& offsets,
               const std::vector<int64_t>& sizes) {
  const size_t dimensions = size.size();
  if (offsets.size() != sizes.size() || (dimensions != 0 && offsets.size() % dimensions != 0)) {
    throw std::invalid_argument("a box must have as many numbers as the tensor has dimensions");
  }
  if (std::find(size.begin(), size.end(), 0) != size.end()) return true;
  // Each dimension is a call within the one before, and whoever made the boxes chose their number.
  if (dimensions > kDimensionsMax) {
    throw std::invalid_argument("a tensor of so many dimensions is none of torch's");
  }
  // Without dimensions there is one element, and nothing to tell of a box.
  if (dimensions == 0) throw std::invalid_argument("a tensor without dimensions has no parts");
  std::vector<int64_t> begins, ends;
  for (size_t at = 0; at < offsets.size(); at += dimensions) {
    bool empty = false;
    for (size_t d = 0; d < dimensions; ++d) {
      const int64_t offset = offsets[at + d], extent = sizes[at + d];
      if (offset < 0 || extent < 0 || extent > size[d] || offset > size[d] - extent) return false;
      empty = empty || extent == 0;
    }
    if (empty) continue;
    for (size_t d = 0; d < dimensions; ++d) {
      begins.push_back(offsets[at + d]);
      ends.push_back(offsets[at + d] + sizes[at + d]);
    }
  }
  if (is_grid(size, begins, ends)) return true;
  const size_t count = begins.size() / dimensions;
  std::vector<size_t> order(count);
  for (size_t i = 0; i < count; ++i) order[i] = i;
  const auto row = [dimensions](const std::vector<int64_t>& of, size_t i) {
    return of.begin() + static_cast<ptrdiff_t>(i * dimensions);
  };
  const auto compare = [&](size_t a, size_t b) {
    for (const auto* of : {&begins, &ends}) {
      for (auto x = row(*of, a), y = row(*of, b); x != row(*of, a + 1); ++x, ++y) {
        if (*x != *y) return *x < *y;
      }
    }
    return false;
  };
  std::sort(order.begin(), order.end(), compare);
  order.erase(std::unique(order.begin(), order.end(),
                          [&](size_t a, size_t b) { return !compare(a, b) && !compare(b, a); }),
              order.end());
  std::vector<Boxes::Term> terms;
  for (const size_t box : order) terms.push_back({1, box});
  terms.push_back({-1, count});
  begins.insert(begins.end(), dimensions, 0);
  ends.insert(ends.end(), size.begin(), size.end());
  return Boxes(dimensions, std::move(begins), std::move(ends)).cancel(std::move(terms), 0);
}

}  // namespace pyckpt
