// A queue of events by time. All events of one instant are in one bucket, because in regular programs thousands of
// ranks act at the same time. The heap then has one entry per instant, not one per event.
#pragma once

#include <queue>
#include <vector>

#include "error.hpp"

namespace meshweave {

struct Event {
  u32 flow;
  u32 version;  // 0: the flow starts; else its end, if it still has this version
};

class Queue {
 public:
  Queue() : slots_(64, EMPTY) {}

  void push(i64 at_ps, Event event) {
    if (at_ps != last_ps_) {
      last_ps_ = at_ps;
      last_ = find(at_ps);
    }
    buckets_[last_].events.push_back(event);
  }

  bool empty() const { return times_.empty(); }
  i64 next_ps() const { return times_.top(); }

  // Moves the events of the next instant out; more may be pushed at the same time and form its next round.
  void take(std::vector<Event>& out) {
    const i64 at_ps = times_.top();
    times_.pop();
    last_ps_ = -1;
    const u32 bucket = erase(at_ps);
    out.clear();
    out.swap(buckets_[bucket].events);
    free_.push_back(bucket);
  }

 private:
  static constexpr u32 EMPTY = UINT32_MAX;

  struct Bucket {
    i64 at_ps = 0;
    std::vector<Event> events;
  };

  size_t home(i64 at_ps) const {
    return static_cast<size_t>((static_cast<u64>(at_ps) * 0x9E3779B97F4A7C15u) >> 32) & (slots_.size() - 1);
  }

  u32 find(i64 at_ps) {
    size_t slot = home(at_ps);
    for (; slots_[slot] != EMPTY; slot = (slot + 1) & (slots_.size() - 1))
      if (buckets_[slots_[slot]].at_ps == at_ps) return slots_[slot];
    u32 bucket;
    if (free_.empty()) {
      bucket = static_cast<u32>(buckets_.size());
      buckets_.emplace_back();
    } else {
      bucket = free_.back();
      free_.pop_back();
    }
    buckets_[bucket].at_ps = at_ps;
    slots_[slot] = bucket;
    times_.push(at_ps);
    if (times_.size() * 2 > slots_.size()) grow();
    return bucket;
  }

  u32 erase(i64 at_ps) {
    size_t slot = home(at_ps);
    while (buckets_[slots_[slot]].at_ps != at_ps) slot = (slot + 1) & (slots_.size() - 1);
    const u32 bucket = slots_[slot];
    // Close the gap, so that no search ends early.
    for (size_t next = (slot + 1) & (slots_.size() - 1); slots_[next] != EMPTY; next = (next + 1) & (slots_.size() - 1)) {
      const size_t wanted = home(buckets_[slots_[next]].at_ps);
      if (((next - wanted) & (slots_.size() - 1)) >= ((next - slot) & (slots_.size() - 1))) {
        slots_[slot] = slots_[next];
        slot = next;
      }
    }
    slots_[slot] = EMPTY;
    return bucket;
  }

  void grow() {
    std::vector<u32> old(slots_.size() * 2, EMPTY);
    old.swap(slots_);
    for (const u32 bucket : old) {
      if (bucket == EMPTY) continue;
      size_t slot = home(buckets_[bucket].at_ps);
      while (slots_[slot] != EMPTY) slot = (slot + 1) & (slots_.size() - 1);
      slots_[slot] = bucket;
    }
  }

  std::priority_queue<i64, std::vector<i64>, std::greater<>> times_;
  std::vector<u32> slots_;
  std::vector<Bucket> buckets_;
  std::vector<u32> free_;
  i64 last_ps_ = -1;  // time of the last bucket pushed to, a cache: most pushes repeat it
  u32 last_ = 0;
};

}  // namespace meshweave
