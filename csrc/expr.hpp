// Coordinate expressions as postfix code in one pool (`ir.program.expressions` in columns).
#pragma once

#include <vector>

#include "error.hpp"

namespace meshweave {

constexpr i64 UNDEFINED = INT64_MIN;  // the value of a name that is not in scope

enum class Code : i64 {
  CONSTANT, VARIABLE, ADD, SUB, MUL, FLOOR_DIV, MOD, MIN, MAX, EQ, NE, LT, LE, GT, GE, AND, OR, SELECT, COUNT
};

struct Token {
  Code code;
  i64 argument;  // the constant, the variable's slot, or the table of a SELECT
};

class Expressions {
 public:
  // Takes (code, argument) pairs, where each expression starts, and tables of entries that are expressions with
  // a smaller number than the expression that selects from them. Raises BadInput.
  Expressions(const std::vector<i64>& code, std::vector<i64> starts, std::vector<i64> tables,
              std::vector<i64> entries, i64 num_vars);

  i64 size() const { return static_cast<i64>(starts_.size()) - 1; }
  i64 evaluate(i64 expr, const std::vector<i64>& env) const;
  // The variables that an expression reads, as bits; slots beyond 62 share the last bit.
  u64 reads(i64 expr) const { return reads_[static_cast<size_t>(expr)]; }

 private:
  i64 run(i64 expr, const std::vector<i64>& env) const;

  std::vector<Token> tokens_;
  std::vector<i64> starts_, tables_, entries_;
  std::vector<u64> reads_;
};

inline u64 variable_bit(i64 slot) { return u64{1} << (slot < 63 ? slot : 63); }

}  // namespace meshweave
