// Coordinate expressions as postfix code in one pool (`ir.program.expressions` in columns).
#pragma once

#include <algorithm>
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

  // For readers of many ranks at once (`lanes.hpp`): the code of an expression, and an entry of a table of constants.
  const Token* begin(i64 expr) const { return tokens_.data() + starts_[static_cast<size_t>(expr)]; }
  const Token* end(i64 expr) const { return tokens_.data() + starts_[static_cast<size_t>(expr) + 1]; }
  // Returns whether all tables that an expression selects from hold constants.
  bool is_simple(i64 expr) const {
    return std::all_of(begin(expr), end(expr), [this](const Token& token) {
      return token.code != Code::SELECT || has_constants_[static_cast<size_t>(token.argument)];
    });
  }
  // Returns whether the table has such an entry, and sets it.
  bool entry(i64 table, i64 index, i64& out) const {
    const i64 first = tables_[static_cast<size_t>(table)];
    if (index < 0 || index >= tables_[static_cast<size_t>(table) + 1] - first) return false;
    out = begin(entries_[static_cast<size_t>(first + index)])->argument;
    return true;
  }

 private:
  i64 run(i64 expr, const std::vector<i64>& env) const;

  std::vector<Token> tokens_;
  std::vector<i64> starts_, tables_, entries_;
  std::vector<u64> reads_;
  std::vector<char> has_constants_;  // by table: whether all entries are single constants
};

// Applies an operation of two operands. Returns false where there is no result: an overflow, or a division by zero.
inline bool applied(Code code, i64 a, i64 b, i64& out) {
  switch (code) {
    case Code::ADD: return !__builtin_add_overflow(a, b, &out);
    case Code::SUB: return !__builtin_sub_overflow(a, b, &out);
    case Code::MUL: return !__builtin_mul_overflow(a, b, &out);
    case Code::FLOOR_DIV:
      if (b == 0 || (b == -1 && a == INT64_MIN)) return false;
      return out = floor_div(a, b), true;
    case Code::MOD:
      if (b == 0) return false;
      return out = floor_mod(a, b), true;
    case Code::MIN: return out = std::min(a, b), true;
    case Code::MAX: return out = std::max(a, b), true;
    case Code::EQ: return out = a == b, true;
    case Code::NE: return out = a != b, true;
    case Code::LT: return out = a < b, true;
    case Code::LE: return out = a <= b, true;
    case Code::GT: return out = a > b, true;
    case Code::GE: return out = a >= b, true;
    case Code::AND: return out = a != 0 && b != 0, true;
    case Code::OR: return out = a != 0 || b != 0, true;
    default: return false;
  }
}

inline u64 variable_bit(i64 slot) { return u64{1} << (slot < 63 ? slot : 63); }

}  // namespace meshweave
