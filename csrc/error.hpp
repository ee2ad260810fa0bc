// The two kinds of error, which the bindings turn into Python exceptions, and checked integer arithmetic.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace meshweave {

using i64 = std::int64_t;
using u64 = std::uint64_t;
using i32 = std::int32_t;
using u32 = std::uint32_t;
using u8 = std::uint8_t;
using u16 = std::uint16_t;
__extension__ typedef unsigned __int128 u128;  // exact products of amounts and picoseconds

// The columns do not describe a program or a machine: a mistake of the caller.
struct BadInput : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The program cannot be expanded or run. `rank` is global; `op` counts in the rank's list; -1 where unknown.
struct ProgramFault : std::runtime_error {
  explicit ProgramFault(const std::string& message, i64 rank_ = -1, i64 op_ = -1)
      : std::runtime_error(message), rank(rank_), op(op_) {}
  i64 rank, op;
};

inline void require(bool condition, const char* message) {
  if (!condition) throw BadInput(message);
}

inline i64 checked_add(i64 a, i64 b) {
  i64 out;
  if (__builtin_add_overflow(a, b, &out)) throw ProgramFault("a number exceeds 64 bits");
  return out;
}

inline i64 checked_sub(i64 a, i64 b) {
  i64 out;
  if (__builtin_sub_overflow(a, b, &out)) throw ProgramFault("a number exceeds 64 bits");
  return out;
}

inline i64 checked_mul(i64 a, i64 b) {
  i64 out;
  if (__builtin_mul_overflow(a, b, &out)) throw ProgramFault("a number exceeds 64 bits");
  return out;
}

// Rounded towards minus infinity, as in Python. The divisor is not 0, and -2**63 / -1 is refused.
inline i64 floor_div(i64 a, i64 b) {
  if (b == -1) return checked_sub(0, a);
  const i64 quotient = a / b;
  return quotient - static_cast<i64>((a % b != 0) && ((a < 0) != (b < 0)));
}

inline i64 floor_mod(i64 a, i64 b) {
  if (b == -1) return 0;
  const i64 rest = a % b;
  return rest != 0 && ((rest < 0) != (b < 0)) ? rest + b : rest;
}

// A place in a ring of `count`, given one that is less than `count` beyond it. Divisions are slow.
inline i64 wrapped(i64 place, i64 count) { return place >= count ? place - count : place; }

}  // namespace meshweave
