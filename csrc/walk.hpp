// The sequential reading of a template on one rank.
#pragma once

#include "columns.hpp"

namespace meshweave {

constexpr i64 MAX_TURNS = 1 << 20;  // as `ir.program`: a loop that repeats more often is taken for a mistake

// The budget of statements that a rank may read: MAX_IDLE, and IDLE_PER_OP more for every op.
constexpr i64 MAX_IDLE = 1 << 24, IDLE_PER_OP = 64;

// Returns the variables of a rank by slot: its global number, `peer`, its coordinates, then loop variables (unset).
inline std::vector<i64> environment(const Template& code, i64 rank) {
  std::vector<i64> env(static_cast<size_t>(code.num_vars), UNDEFINED);
  env[0] = code.ranks[static_cast<size_t>(rank)];
  for (i64 slot = 0; slot < code.num_coords; ++slot) env[static_cast<size_t>(2 + slot)] = code.coordinate(rank, slot);
  return env;
}

// Calls visit(row of the op, env, key) for every op of a rank; the key is the position in the sequential reading.
template <class Visit>
class Walker {
 public:
  Walker(const Template& code, i64 rank, Visit visit)
      : code_(code), rank_(rank), visit_(std::move(visit)), env_(environment(code, rank)) {}

  void run() { body(0, static_cast<i64>(code_.statements.size())); }

 private:
  void body(i64 at, i64 stop) {
    for (i64 number = 0; at < stop; ++number) {
      const StatementRow& row = code_.statements[static_cast<size_t>(at)];
      if (--idle_ < 0)
        throw ProgramFault("reads too many statements that lead to no op", code_.ranks[static_cast<size_t>(rank_)]);
      key_.push_back(number);
      if (row.type == Statement::OP) {
        idle_ += IDLE_PER_OP;
        visit_(row.what, env_, key_);
      } else if (row.type == Statement::ON) {
        if (code_.in_set(row.what, rank_)) body(at + 1, row.end);
      } else if (row.type == Statement::WHEN) {
        if (code_.expressions.evaluate(row.expr, env_)) body(at + 1, row.end);
      } else {
        repeat(row, at);
      }
      key_.pop_back();
      at = row.end;
    }
  }

  void repeat(const StatementRow& row, i64 at) {
    const i64 turns = code_.expressions.evaluate(row.expr, env_);
    if (turns > MAX_TURNS)
      throw ProgramFault("repeats " + std::to_string(turns) + " times, over the limit of " + std::to_string(MAX_TURNS),
                         code_.ranks[static_cast<size_t>(rank_)]);
    const i64 outer = env_[static_cast<size_t>(row.what)];
    for (i64 turn = 0; turn < turns; ++turn) {
      --idle_;
      env_[static_cast<size_t>(row.what)] = turn;
      key_.push_back(turn);
      body(at + 1, row.end);
      key_.pop_back();
    }
    env_[static_cast<size_t>(row.what)] = outer;
  }

  const Template& code_;
  i64 rank_, idle_ = MAX_IDLE;
  Visit visit_;
  std::vector<i64> env_;
  std::vector<i64> key_;
};

template <class Visit>
void walk(const Template& code, i64 rank, Visit visit) {
  Walker<Visit>(code, rank, std::move(visit)).run();
}

}  // namespace meshweave
