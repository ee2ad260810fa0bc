// A queue in one block of memory, which grows to the most that it has held.
#pragma once

#include <vector>

#include "error.hpp"

namespace meshweave {

template <class T>
class RingBuffer {
 public:
  bool empty() const { return first_ == end_; }
  size_t size() const { return end_ - first_; }
  const T& front() const { return items_[first_ & mask()]; }

  void push_back(const T& item) {
    if (size() == items_.size()) grow();
    items_[end_++ & mask()] = item;
  }
  void pop_front() { ++first_; }

 private:
  size_t mask() const { return items_.size() - 1; }  // sizes are powers of two

  void grow() {
    std::vector<T> larger(items_.empty() ? 8 : 2 * items_.size());
    const size_t count = size();
    for (size_t at = 0; at < count; ++at) larger[at] = items_[(first_ + at) & mask()];
    items_.swap(larger);
    first_ = 0;
    end_ = count;
  }

  std::vector<T> items_;
  size_t first_ = 0, end_ = 0;  // counts of all that has been taken out, and put in
};

}  // namespace meshweave
