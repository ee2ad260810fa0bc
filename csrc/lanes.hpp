// Expressions evaluated for many ranks at once: a lane for each rank.
#pragma once

#include <map>
#include <vector>

#include "columns.hpp"

namespace meshweave {

// The value of an expression in every lane: one number for all of them, or a row of numbers.
struct LaneValues {
  static constexpr i64 SAME = -1;

  i64 row = SAME;  // in Lanes; equal rows have equal numbers
  i64 value = 0;   // where all lanes have it

  bool operator==(const LaneValues&) const = default;
};

// Lane 0 is the rank that the others are compared with. A lane whose expression has no value is dropped, and so is one
// that the caller sees to differ; a dropped lane is never taken in again. Where lane 0 has none, ProgramFault is raised.
class Lanes {
 public:
  // `env` holds the variables of lane 0 and belongs to the caller, who sets loop variables in it.
  Lanes(const Template& code, std::vector<i64> ranks, const std::vector<i64>& env);

  i64 size() const { return static_cast<i64>(ranks.size()); }
  // Returns false where the rows take more memory than they may: nothing is known then.
  bool has_room() const { return rows_.size() <= MAX_VALUES; }
  // Returns whether any lane but the first is left.
  bool any() const { return num_left_ > 1; }
  bool has(i64 lane) const { return left_[static_cast<size_t>(lane)] != 0; }
  void drop(i64 lane);

  LaneValues evaluate(i64 expr);
  // Drops the lanes in which an expression has another value than in lane 0. Returns the latter.
  i64 agreed(i64 expr);
  // Returns a row of given values, one for each lane.
  LaneValues intern(const std::vector<i64>& values);
  i64 at(LaneValues values, i64 lane) const {
    return values.row == LaneValues::SAME ? values.value : rows_[static_cast<size_t>(values.row * size() + lane)];
  }

  u64 varying() const { return varying_; }  // variables that differ between lanes, as bits

  const std::vector<i64> ranks;  // positions

 private:
  static constexpr size_t MAX_VALUES = size_t{1} << 23;

  bool is_same(i64 expr) const { return (code_.expressions.reads(expr) & varying_) == 0; }
  void run(i64 expr, std::vector<i64>& out);

  const Template& code_;
  const std::vector<i64>& env_;
  u64 varying_ = 0;
  std::vector<char> left_;
  i64 num_left_;
  std::vector<i64> rows_;
  std::multimap<u64, i64> by_hash_;
  std::map<i64, LaneValues> known_;  // of expressions that read no loop variable
  std::vector<std::vector<i64>> stack_;
  std::vector<i64> scratch_;
};

}  // namespace meshweave
