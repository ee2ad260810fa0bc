// The last-level cache of a GPU: lines by set, least recently used out first, written back, allocated without a fetch.
#pragma once

#include <bit>
#include <vector>

#include "error.hpp"

namespace meshweave {

class Cache {
 public:
  struct Line {
    i64 ready_ps = 0;    // when its data are there
    u32 waiters = NONE;  // a list of those who wait for its data
    u16 source = 0;      // who wrote it
    bool dirty = false;
  };
  static constexpr u64 EMPTY = UINT64_MAX;
  static constexpr u32 NONE = UINT32_MAX;

  Cache(i64 lines, i64 ways, bool plain_sets)
      : plain_sets_(plain_sets),
        ways_(static_cast<size_t>(ways)),
        sets_(static_cast<size_t>(lines / ways)),
        words_((ways_ + 7) / 8),
        digests_(sets_ * words_, 0),
        numbers_(sets_ * ways_, u64{EMPTY}),
        used_(sets_ * ways_, 0),
        lines_(sets_ * ways_) {}

  // Has the processor fetch what find() will read first.
  void prefetch(u64 number) const { __builtin_prefetch(&digests_[set_of(number, mix(number)) * words_]); }

  // Returns the place of a line; NONE if it is not there.
  u32 find(u64 number) {
    const u64 mixed = mix(number), wanted = digest(mixed) * BYTES;
    const size_t set = set_of(number, mixed);
    for (size_t word = 0; word < words_; ++word) {
      const u64 difference = digests_[set * words_ + word] ^ wanted;
      // The high bit of each byte that is zero, and perhaps of some above one that is.
      for (u64 zeros = (difference - BYTES) & ~difference & (BYTES << 7); zeros; zeros &= zeros - 1) {
        const size_t way = 8 * word + static_cast<size_t>(std::countr_zero(zeros)) / 8, at = set * ways_ + way;
        if (way >= ways_ || numbers_[at] != number) continue;
        used_[at] = ++clock_ | (used_[at] & PENDING);
        return static_cast<u32>(at);
      }
    }
    return NONE;
  }

  // Returns the place for a new line: what was used longest ago in its set, as it is; NONE if all wait for data.
  u32 victim(u64 number) const {
    const size_t first = set_of(number, mix(number)) * ways_;
    size_t out = first;
    for (size_t at = first + 1; at < first + ways_; ++at) out = used_[at] < used_[out] ? at : out;
    return used_[out] & PENDING ? NONE : static_cast<u32>(out);
  }

  void put(u32 at, u64 number, bool pending) {
    const u64 mixed = mix(number);
    const size_t set = set_of(number, mixed), way = at - set * ways_;
    u64& digests = digests_[set * words_ + way / 8];
    digests = (digests & ~(u64{0xFF} << 8 * (way % 8))) | digest(mixed) << 8 * (way % 8);
    numbers_[at] = number;
    used_[at] = ++clock_ | (pending ? PENDING : 0);
    lines_[at] = Line{};
  }

  bool is_pending(u32 at) const { return used_[at] & PENDING; }
  void set_ready(u32 at, i64 ready_ps) {
    used_[at] &= ~PENDING;
    lines_[at].ready_ps = ready_ps;
  }
  u64 number(u32 at) const { return numbers_[at]; }
  Line& line(u32 at) { return lines_[at]; }

 private:
  static constexpr u64 PENDING = u64{1} << 63;  // of a line's time of use: its data are still to come
  static constexpr u64 BYTES = 0x0101010101010101u;

  // The set of a line is by the high bits of this, or by the line's number alone; its digest some of the middle.
  static u64 mix(u64 number) { return number * 0x9E3779B97F4A7C15u; }
  static u64 digest(u64 mixed) { return (mixed >> 24) & 0xFF; }
  size_t set_of(u64 number, u64 mixed) const {
    return plain_sets_ ? static_cast<size_t>(number % sets_) : static_cast<size_t>((static_cast<u128>(mixed) * sets_) >> 64);
  }

  // Apart, so that a look-up reads one line of the processor's own cache for all ways, and then only what it wants.
  bool plain_sets_;
  size_t ways_, sets_, words_;   // words_: of a set's digests
  std::vector<u64> digests_;     // a byte of each way, by set
  std::vector<u64> numbers_, used_;
  std::vector<Line> lines_;
  u64 clock_ = 0;
};

}  // namespace meshweave
