#include "lanes.hpp"

#include <algorithm>

#include "walk.hpp"

namespace meshweave {
namespace {

u64 row_hash(const std::vector<i64>& values) {
  u64 hash = values.size();
  for (const i64 value : values) hash = (hash ^ static_cast<u64>(value)) * 0x9E3779B97F4A7C15u + (hash >> 32);
  return hash;
}

}  // namespace

Lanes::Lanes(const Template& code, std::vector<i64> ranks_, const std::vector<i64>& env)
    : ranks(std::move(ranks_)), code_(code), env_(env), left_(ranks.size(), 1), num_left_(static_cast<i64>(ranks.size())) {
  for (i64 slot = 0; slot < 2 + code.num_coords; ++slot) varying_ |= variable_bit(slot);
}

void Lanes::drop(i64 lane) {
  if (lane == 0) throw ProgramFault("an expression has no value");
  num_left_ -= left_[static_cast<size_t>(lane)];
  left_[static_cast<size_t>(lane)] = 0;
}

LaneValues Lanes::evaluate(i64 expr) {
  if (is_same(expr)) return {LaneValues::SAME, code_.expressions.evaluate(expr, env_)};
  // The last bit is of several variables, and some of them may be those of loops.
  const bool is_fixed = (code_.expressions.reads(expr) & (~varying_ | variable_bit(63))) == 0;
  if (is_fixed)
    if (const auto found = known_.find(expr); found != known_.end()) return found->second;
  run(expr, scratch_);
  const LaneValues out = intern(scratch_);
  if (is_fixed) known_.emplace(expr, out);
  return out;
}

i64 Lanes::agreed(i64 expr) {
  const LaneValues values = evaluate(expr);
  if (values.row != LaneValues::SAME)
    for (i64 lane = 1; lane < size(); ++lane)
      if (at(values, lane) != at(values, 0)) drop(lane);
  return at(values, 0);
}

LaneValues Lanes::intern(const std::vector<i64>& values) {
  if (std::adjacent_find(values.begin(), values.end(), std::not_equal_to<>()) == values.end())
    return {LaneValues::SAME, values[0]};
  const u64 hash = row_hash(values);
  for (auto [at, end] = by_hash_.equal_range(hash); at != end; ++at)
    if (std::equal(values.begin(), values.end(), rows_.begin() + at->second * size())) return {at->second, 0};
  const auto row = static_cast<i64>(rows_.size() / values.size());
  rows_.insert(rows_.end(), values.begin(), values.end());
  by_hash_.emplace(hash, row);
  return {row, 0};
}

// The values of an expression that differs between lanes. Lanes in which it has none are dropped, and hold 0.
void Lanes::run(i64 expr, std::vector<i64>& out) {
  const auto count = static_cast<size_t>(size());
  const Expressions& expressions = code_.expressions;
  out.assign(count, 0);
  if (!expressions.is_simple(expr)) {
    std::vector<i64> env = env_;
    for (size_t lane = 0; lane < count; ++lane) {
      const i64 rank = ranks[lane];
      env[0] = code_.ranks[static_cast<size_t>(rank)];
      for (i64 slot = 0; slot < code_.num_coords; ++slot) env[static_cast<size_t>(2 + slot)] = code_.coordinate(rank, slot);
      try {
        out[lane] = expressions.evaluate(expr, env);
      } catch (const ProgramFault&) {
        if (lane == 0) throw;
        drop(static_cast<i64>(lane));
      }
    }
    return;
  }
  size_t top = 0;  // one beyond the last value
  const auto push = [&]() -> std::vector<i64>& {
    if (top == stack_.size()) stack_.emplace_back();
    stack_[top].resize(count);
    return stack_[top++];
  };
  for (const Token* token = expressions.begin(expr); token != expressions.end(expr); ++token) {
    if (token->code == Code::CONSTANT) {
      auto& values = push();
      std::fill(values.begin(), values.end(), token->argument);
    } else if (token->code == Code::VARIABLE) {
      const i64 slot = token->argument;
      auto& values = push();
      for (size_t lane = 0; lane < count; ++lane) {
        values[lane] = slot == 0 ? code_.ranks[static_cast<size_t>(ranks[lane])]
                       : slot >= 2 && slot < 2 + code_.num_coords ? code_.coordinate(ranks[lane], slot - 2)
                                                                  : env_[static_cast<size_t>(slot)];
        if (values[lane] == UNDEFINED) drop(static_cast<i64>(lane)), values[lane] = 0;
      }
    } else if (token->code == Code::SELECT) {
      auto& values = stack_[top - 1];
      for (size_t lane = 0; lane < count; ++lane)
        if (!expressions.entry(token->argument, values[lane], values[lane])) drop(static_cast<i64>(lane)), values[lane] = 0;
    } else {
      --top;
      const auto& right = stack_[top];
      auto& left = stack_[top - 1];
      for (size_t lane = 0; lane < count; ++lane)
        if (!applied(token->code, left[lane], right[lane], left[lane])) drop(static_cast<i64>(lane)), left[lane] = 0;
    }
  }
  out = stack_[0];
}

}  // namespace meshweave
